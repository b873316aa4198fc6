#pragma once

#include <sys/types.h>

namespace tessera {

/// Tells whether another process of this machine is still running. A zombie does not count as running. The handle holds
/// a pidfd, so it cannot mistake a later process with the same number for the first one. It is move-only.
class ProcessHandle {
 public:
  ProcessHandle() = default;
  explicit ProcessHandle(pid_t pid);
  ProcessHandle(ProcessHandle&& other) noexcept { *this = static_cast<ProcessHandle&&>(other); }
  ProcessHandle& operator=(ProcessHandle&& other) noexcept;
  ~ProcessHandle();

  bool alive() const;

 private:
  pid_t pid_ = 0;
  int fd_ = -1;
  bool gone_ = false;
};

}  // namespace tessera
