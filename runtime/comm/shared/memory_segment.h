#pragma once

#include <absl/status/statusor.h>
#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>

namespace tessera {

/// A mapping of memory that other processes can map too (memfd_create(2)). It has no name in any file system, so it
/// vanishes with the last process that maps it, however that process ends. Its size is sealed: no process can shrink it
/// while another uses it. It is move-only; the destructor unmaps and closes.
class MemorySegment {
 public:
  MemorySegment() = default;
  MemorySegment(MemorySegment&& other) noexcept { *this = std::move(other); }
  MemorySegment& operator=(MemorySegment&& other) noexcept;
  ~MemorySegment();

  /// Makes zero-filled memory. `name` shows in /proc/<pid>/maps. If `populate` is true, all pages are present when this
  /// function returns. Error: 71 if there is not that much memory.
  static absl::StatusOr<MemorySegment> create(const std::string& name, std::size_t bytes, bool populate);

  /// Maps the segment behind file descriptor `fd` of process `pid`, while that descriptor is open, through
  /// /proc/<pid>/fd. The processes must have the same PID namespace and the same user. If `populate` is true, this
  /// process's page tables are filled now, and not by page faults later. Errors: 75 if the process is gone, 77 if this
  /// process may not access it, 70 if the segment's size is not `bytes`.
  static absl::StatusOr<MemorySegment> open(pid_t pid, int fd, std::size_t bytes, bool populate);

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  /// Gives up the descriptor; the caller closes it. Other processes can open the segment until the descriptor is
  /// closed, whatever happens to this object.
  int release_fd() { return std::exchange(fd_, -1); }
  /// Closes the descriptor, so that other processes can no longer open the segment through this process.
  void close_fd();

 private:
  absl::Status map(std::size_t bytes);
  absl::Status populate();

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int fd_ = -1;
};

}  // namespace tessera
