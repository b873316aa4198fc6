#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <string>
#include <utility>

namespace tessera {

/// A locked file, which says who holds it. The system releases the lock when the holder's process ends, however it
/// ends.
class FolderLock {
 public:
  /// Makes the file if it is not there, and locks it. `does`: what the holder does, for the message of others, such as
  /// "another process saves a checkpoint to /runs/a now". If locks are not available, as on some network file systems,
  /// it warns and goes on. Errors: 69 if another process still holds it after `patience`; 73 if it cannot be created;
  /// 77 without permission; 71 without free descriptors or memory; 74 if a call fails for another reason.
  static absl::StatusOr<FolderLock> take(const std::string& path, const std::string& does, const std::string& who,
                                         std::chrono::milliseconds patience = {});
  FolderLock() = default;
  FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FolderLock();

  /// Call it in a process that was forked from the holder: the lock then belongs to the holder alone, whatever becomes
  /// of this process.
  void forget();

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace tessera
