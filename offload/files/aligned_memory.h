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
/// 1. It begins at a multiple of 2 MiB if it has 2 MiB or more, else of 4 KiB. So it may be read and written past the
///    page cache (O_DIRECT), and a device can copy long contiguous pieces.
/// 2. It occupies exactly `bytes()`: what was asked for, rounded up to 4 KiB. All pages are present when `make`
///    returns, so no page fault delays a step.
/// 3. The kernel is asked for huge pages (MADV_HUGEPAGE), and may decline.
///
/// It is move-only; the destructor gives the memory back.
///
/// The driver of a device gives the memory if the device copies from and to it (`give`). Then the driver decides about
/// points 1 and 3, except that the memory begins at a multiple of 4 KiB.
class AlignedMemory {
 public:
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

  AlignedMemory() = default;
  AlignedMemory(AlignedMemory&& other) noexcept { *this = std::move(other); }
  AlignedMemory& operator=(AlignedMemory&& other) noexcept;
  ~AlignedMemory();

  /// Error (71), which begins with `who`, if there is not enough memory. `bytes` may be 0.
  static absl::StatusOr<AlignedMemory> make(std::size_t bytes, const std::string& who);
  /// Returns `bytes` bytes of memory, zeroed, at a multiple of 4 KiB.
  using Give = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;
  /// Takes the memory from `give`, unless that is null. Exceptions of `give` reach the caller.
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
  std::shared_ptr<std::byte> given_;  ///< owns the memory, where it was given
};

}  // namespace tessera
