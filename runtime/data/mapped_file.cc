#include "runtime/data/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "runtime/base/status.h"

namespace tessera {
namespace {

ExitCode exit_code_of_errno(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return ExitCode::kNoInput;
    case EACCES:
    case EPERM:
      return ExitCode::kPermission;
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return ExitCode::kOsResource;
    default:
      return ExitCode::kIo;
  }
}

absl::Status errno_error(const std::filesystem::path& path, const char* what, int error) {
  return make_error(exit_code_of_errno(error),
                    fmt::format("{}: cannot {}: {}", path.string(), what, std::generic_category().message(error)));
}

/// Closes on leaving its scope.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

absl::StatusOr<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe would wait for its writer, before fstat can tell what it is.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) return errno_error(path, "open", errno);
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) return errno_error(path, "stat", errno);
  if (!S_ISREG(info.st_mode))
    return make_error(ExitCode::kCorruptData, fmt::format("{}: want a regular file, got a {}", path.string(),
                                                          S_ISDIR(info.st_mode) ? "directory" : "pipe or device"));
  MappedFile result;
  result.path_ = path;
  result.size_ = static_cast<std::size_t>(info.st_size);
  if (result.size_ == 0) return result;  // mmap refuses zero bytes
  void* data = ::mmap(nullptr, result.size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    result.size_ = 0;
    return errno_error(path, "map", error);
  }
  result.data_ = static_cast<const std::byte*>(data);
  return result;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace tessera
