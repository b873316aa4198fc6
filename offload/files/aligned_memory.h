#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace tessera {

/// Anonymous memory of this process, zeroed, for records and their transfers.
///
/// 1. It begins at a multiple of 2 MiB if it has 2 MiB or more; otherwise it begins at a multiple of 4 KiB. So it may
///    be read and written past the page cache (O_DIRECT), and a device can copy long contiguous pieces.
/// 2. It occupies exactly `bytes()`: the requested bytes, rounded up to 4 KiB. All pages are present when `make`
///    returns, so no page fault delays a step.
/// 3. The kernel is asked for huge pages (MADV_HUGEPAGE), and may decline.
///
/// It is move-only. The destructor frees the memory.
///
/// If a device copies from and to the memory, the driver of the device allocates it (`give`). Then the driver decides
/// about points 1 and 3, but the memory still begins at a multiple of 4 KiB.
class AlignedMemory {
 public:
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

  AlignedMemory() = default;
  AlignedMemory(AlignedMemory&& other) noexcept { *this = std::move(other); }
  AlignedMemory& operator=(AlignedMemory&& other) noexcept;
  ~AlignedMemory();

  /// Makes the memory. Errors: 71 if there is not enough memory; the message begins with `who`. `bytes` may be 0.
  static absl::StatusOr<AlignedMemory> make(std::size_t bytes, const std::string& who);
  /// A function that returns `bytes` bytes of memory, filled with zeros, at a multiple of 4 KiB.
  using Give = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;
  /// Takes the memory from `give`, unless `give` is null. Exceptions of `give` reach the caller.
  static absl::StatusOr<AlignedMemory> make(std::size_t bytes, const std::string& who, const Give& give);
  /// Returns the bytes that `make(bytes)` occupies.
  static constexpr std::size_t occupied_bytes(std::size_t bytes) {
    return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::shared_ptr<std::byte> given_;  ///< owns the memory, if a driver allocated it
};

}  // namespace tessera
