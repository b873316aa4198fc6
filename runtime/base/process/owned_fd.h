#pragma once

#include <unistd.h>

#include <utility>

namespace tessera {

/// A file descriptor with an owner, which closes it. It is move-only.
class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.release()) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  /// Closes the descriptor.
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  /// Gives the descriptor away. The object has none afterwards.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace tessera
