#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <string>
#include <utility>

namespace tessera {

/// A locked file, which says who holds it. The system takes the lock back when its process ends, however it ends.
class FolderLock {
 public:
  /// Makes the file if it is not there. `does`: what its holder does, as others are told: "another process saves a checkpoint to
  /// /runs/a now". Where locks are not to be had, as on some network file systems, it warns and goes on.
  /// Errors: 69 if somebody else still holds it after `patience`; 73, 77, 71, 74.
  static absl::StatusOr<FolderLock> take(const std::string& path, const std::string& does, const std::string& who,
                                         std::chrono::milliseconds patience = {});
  FolderLock() = default;
  FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FolderLock();

  /// In a process that was forked from the holder: the lock is that process's alone, whatever becomes of this one.
  void forget();

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace tessera
