#include "offload/files/aligned_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <limits>

#include "offload/files/file_error.h"
#include "runtime/base/bytes.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

absl::Status no_memory(const std::string& who, std::size_t bytes, int error) {
  return make_error(ExitCode::kOsResource,
                    fmt::format("{}: wanted {} ({} bytes) of memory: {}. [T0368] hint: a smaller \"cache\", "
                                "\"queue_depth\" or \"record\" of \"offload\" needs less",
                                who, format_bytes(static_cast<std::int64_t>(bytes)), bytes, errno_text(error)));
}

// Makes all pages present. Kernels before 5.14 do not have MADV_POPULATE_WRITE; on such kernels the function writes to
// each page.
int populate(std::byte* data, std::size_t bytes) {
  if (::madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (std::size_t at = 0; at < bytes; at += AlignedMemory::kPageBytes)
    *const_cast<volatile std::byte*>(data + at) = std::byte{0};
  return 0;
}

}  // namespace

absl::StatusOr<AlignedMemory> AlignedMemory::make(std::size_t bytes, const std::string& who) {
  AlignedMemory memory;
  if (bytes == 0) return memory;
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) / 2)
    return no_memory(who, bytes, ENOMEM);
  const std::size_t wanted = occupied_bytes(bytes);
  const std::size_t alignment = wanted >= kHugePageBytes ? kHugePageBytes : kPageBytes;
  // Maps the extra bytes that alignment may need, and then unmaps those before and behind the aligned part.
  const std::size_t reserved = wanted + alignment - kPageBytes;
  void* const mapped = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return no_memory(who, bytes, errno);
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t before = (alignment - reinterpret_cast<std::uintptr_t>(begin) % alignment) % alignment;
  const std::size_t behind = reserved - before - wanted;
  if (before != 0) ::munmap(begin, before);
  if (behind != 0) ::munmap(begin + before + wanted, behind);
  memory.data_ = begin + before;
  memory.bytes_ = wanted;
  if (alignment == kHugePageBytes) ::madvise(memory.data_, wanted, MADV_HUGEPAGE);
  if (const int error = populate(memory.data_, wanted); error != 0) return no_memory(who, bytes, error);
  return memory;
}

absl::StatusOr<AlignedMemory> AlignedMemory::make(std::size_t bytes, const std::string& who, const Give& give) {
  if (give == nullptr || bytes == 0) return make(bytes, who);
  AlignedMemory memory;
  memory.given_ = give(occupied_bytes(bytes));
  memory.data_ = memory.given_.get();
  memory.bytes_ = occupied_bytes(bytes);
  if (reinterpret_cast<std::uintptr_t>(memory.data_) % kPageBytes != 0)
    return make_error(ExitCode::kInternal, fmt::format("{}: memory for records does not begin at a page", who));
  return memory;
}

AlignedMemory& AlignedMemory::operator=(AlignedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(given_, other.given_);
  return *this;
}

AlignedMemory::~AlignedMemory() {
  if (data_ != nullptr && given_ == nullptr) ::munmap(data_, bytes_);
}

}  // namespace tessera
