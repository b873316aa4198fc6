#include "runtime/data/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "runtime/base/input_file.h"
#include "runtime/base/status.h"

namespace tessera {

absl::StatusOr<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(const InputFile file, InputFile::open(path, ""));
  MappedFile result;
  result.path_ = path;
  result.size_ = file.size();
  if (result.size_ == 0) return result;  // mmap refuses a length of 0
  void* data = ::mmap(nullptr, result.size_, PROT_READ, MAP_PRIVATE, file.fd(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    result.size_ = 0;
    return input_error(path, "", "cannot be mapped", error);
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
