#pragma once

#include <absl/status/statusor.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera {

/// A small process that lives slightly longer than the launcher. If the launcher dies in any way, the guard kills every
/// process group that it watches and removes the error files. A rank itself would end because of its parent-death
/// signal. The rank's children (data loaders, shells) would not end, and would hold ports and memory after a crash.
///
/// The guard waits for the end of a pipe whose only writer is the launcher. It therefore does not poll and takes no CPU
/// time, and the pipe ends even if SIGKILL ends the launcher. The guard leads its own session, so signals of the
/// terminal do not reach it.
class Guard {
 public:
  /// Starts the guard. REQUIRES: no rank was started yet. (The guard would inherit the files of ranks, until it closes
  /// them.)
  static absl::StatusOr<Guard> start(const std::string& error_directory, const std::vector<std::string>& error_files);

  Guard(Guard&& other) noexcept;
  Guard& operator=(Guard&&) = delete;
  /// Ends the guard without killing anything.
  ~Guard();

  /// Makes the guard kill `group` if the launcher dies from now on. Call `forget` after the group is empty.
  void watch(pid_t group);
  void forget(pid_t group);

 private:
  Guard(pid_t pid, int pipe) : pid_(pid), pipe_(pipe) {}
  void tell(pid_t message);

  pid_t pid_;
  int pipe_;
};

}  // namespace tessera
