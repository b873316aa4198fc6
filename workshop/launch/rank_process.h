#pragma once

#include <absl/status/statusor.h>
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/process/owned_fd.h"

namespace tessera {

/// Hands the content of a non-blocking pipe to `take`, at most a few buffers in each call. So a writer that never stops
/// cannot keep the caller from other pipes. Closes `from` when the pipe ends.
void read_some(OwnedFd& from, const std::function<void(std::string_view)>& take);

/// The way in which a rank ended.
struct RankExit {
  int wait_status = 0;  ///< status of waitpid
  std::chrono::system_clock::time_point when;
  std::int64_t peak_resident_bytes = 0;
  std::optional<std::int64_t> memory_limit_bytes;  ///< the cgroup's limit, if it has one and SIGKILL ended the rank

  bool failed() const { return wait_status != 0; }
  /// Returns the code that a shell reports: the exit code, or 128 + n for signal n.
  int code() const;
  /// Returns the signal that ended the rank, if a signal did.
  std::optional<int> signal() const;
};

/// One started rank: the leader of its own process group, with pipes for its output. The kernel kills the leader when
/// the thread that started it ends (PR_SET_PDEATHSIG).
struct RankProcess {
  pid_t pid = -1;  ///< also the number of the rank's process group
  OwnedFd exited;  ///< a pidfd: readable when the leader ends
  OwnedFd out;     ///< non-blocking
  OwnedFd err;     ///< non-blocking
  OwnedFd in;      ///< non-blocking; closed if the rank reads /dev/null

  /// Reaps the leader if it has ended, and returns how it ended.
  std::optional<RankExit> reap() const;
  /// Sends `signal` to the whole group.
  void send(int signal) const;
  /// Reaps other processes of the group that became the launcher's children. Returns true if the group has no process
  /// left. REQUIRES: the leader was reaped. Don't call this function again for a group that was empty, since the system
  /// may give the group's number to other processes.
  bool is_group_empty() const;
  /// Returns true if the leader is stopped (SIGSTOP, a debugger).
  bool is_stopped() const;
};

enum class StandardInput { kNull, kPipe };

/// Starts `command` with `environment`. `mask` is the signal mask that the program starts with.
/// Errors: 66 if there is no such program, 77 if it may not be executed, 71 if the system refuses processes or files.
absl::StatusOr<RankProcess> start_rank(const std::vector<std::string>& command,
                                       const std::vector<std::string>& environment, const sigset_t& mask,
                                       StandardInput input = StandardInput::kNull);

}  // namespace tessera
