#include "runtime/comm/shared/memory_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // this needs Linux 5.14
#endif

namespace tessera {
namespace {

std::string error_text() { return std::strerror(errno); }

absl::Status no_memory(std::size_t bytes, const char* call) {
  const int error = errno;
  const bool is_short = error == ENOMEM || error == ENOSPC;
  return make_error(
      ExitCode::kOsResource,
      "cannot have " + std::to_string(bytes) + " bytes of shared memory: " + call + ": " +
          (is_short ? errno_text(error) + ". [T0487] hint: free memory or shard over more ranks" : reason_of(error)));
}

}  // namespace

MemorySegment& MemorySegment::operator=(MemorySegment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

MemorySegment::~MemorySegment() {
  if (data_) munmap(data_, bytes_);
  close_fd();
}

void MemorySegment::close_fd() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

absl::Status MemorySegment::map(std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) return no_memory(bytes, "mmap");
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  return absl::OkStatus();
}

// Fills page tables now, and not during the first step. A shortage of memory is then an error and not SIGBUS.
absl::Status MemorySegment::populate() {
  if (madvise(data_, bytes_, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
  if (errno != EINVAL) return no_memory(bytes_, "madvise(MADV_POPULATE_WRITE)");
  return posix_fallocate(fd_, 0, static_cast<off_t>(bytes_)) == 0 ? absl::OkStatus()
                                                                  : no_memory(bytes_, "posix_fallocate");
}

absl::StatusOr<MemorySegment> MemorySegment::create(const std::string& name, std::size_t bytes, bool populate) {
  MemorySegment segment;
  segment.fd_ = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment.fd_ < 0) return no_memory(bytes, "memfd_create");
  if (ftruncate(segment.fd_, static_cast<off_t>(bytes)) != 0) return no_memory(bytes, "ftruncate");
  if (fcntl(segment.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return no_memory(bytes, "fcntl(F_ADD_SEALS)");
  TESSERA_RETURN_IF_ERROR(segment.map(bytes));
  if (populate) TESSERA_RETURN_IF_ERROR(segment.populate());
  return segment;
}

absl::StatusOr<MemorySegment> MemorySegment::open(pid_t pid, int fd, std::size_t bytes, bool populate) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  MemorySegment segment;
  segment.fd_ = ::open(path.c_str(), O_CLOEXEC | O_RDWR);
  if (segment.fd_ < 0 && (errno == EACCES || errno == EPERM))
    return make_error(ExitCode::kPermission,
                      "cannot open " + path + ": " + error_text() +
                          ". [T0488] hint: run the ranks of a host as one user, or take comm.transport \"gloo\"");
  if (segment.fd_ < 0)
    return make_error(
        ExitCode::kPeerLost,
        "cannot open " + path + ": " + error_text() + ": process " + std::to_string(pid) +
            " is gone, or in another PID namespace. [T0489] hint: in the latter case take comm.transport \"gloo\"");
  struct stat info {};
  if (fstat(segment.fd_, &info) != 0 || static_cast<std::size_t>(info.st_size) != bytes)
    return make_error(ExitCode::kInternal,
                      path + " wants " + std::to_string(bytes) + " bytes, got " + std::to_string(info.st_size));
  TESSERA_RETURN_IF_ERROR(segment.map(bytes));
  if (populate) TESSERA_RETURN_IF_ERROR(segment.populate());
  segment.close_fd();
  return segment;
}

}  // namespace tessera
