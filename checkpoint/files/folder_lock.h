#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <string>
#include <utility>

#include "offload/files/file_place.h"

namespace tessera {

/// A locked file, whose text names the holder of the lock. The system releases the lock when the holder's process ends,
/// however it ends.
class FolderLock {
 public:
  /// Makes the file if it does not exist, and locks it. `does`: a text for messages of other processes that says what
  /// the holder does, as in "another process saves a checkpoint to /runs/a now". If locks are not available, as on some
  /// network file systems, it warns and continues without a lock. Errors: 69 if another process still holds the lock
  /// after `patience`; 73 if the file cannot be created; 77 without permission; 71 without free descriptors or memory;
  /// 74 if a call fails for another reason.
  static absl::StatusOr<FolderLock> take(const FilePlace& file, const std::string& does, const std::string& who,
                                         std::chrono::milliseconds patience = {});
  FolderLock() = default;
  FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FolderLock();

  /// Call it in a process that was forked from the holder. The lock then belongs only to the holder, whatever happens
  /// to this process.
  void forget();

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace tessera
