#pragma once

#include <sys/types.h>

namespace tessera {

/// Says whether another process of this machine still runs. A zombie does not run in this sense. It holds a pidfd, so
/// it does not mistake a later process with the same number for it. It is move-only.
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
