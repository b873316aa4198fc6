#include "runtime/comm/process_handle.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace tessera {

ProcessHandle::ProcessHandle(pid_t pid) : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  gone_ = fd_ < 0 && errno == ESRCH;
}

ProcessHandle& ProcessHandle::operator=(ProcessHandle&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(fd_, other.fd_);
  std::swap(gone_, other.gone_);
  return *this;
}

ProcessHandle::~ProcessHandle() {
  if (fd_ >= 0) close(fd_);
}

// On a kernel without pidfds (before 5.3), the function returns true for a zombie. The time limit of a collective then
// shows that the rank is lost.
bool ProcessHandle::alive() const {
  if (gone_) return false;
  if (fd_ < 0) return kill(pid_, 0) == 0 || errno != ESRCH;
  pollfd ended{fd_, POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

}  // namespace tessera
