#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// Transfers that bypass the page cache begin and end at multiples of this number, in the file and in memory. Devices
/// require multiples of 512 or of 4096 bytes, and multiples of 4096 are right for all of them.
inline constexpr std::size_t kSectorBytes = 4096;

/// Returns `bytes` rounded up to whole sectors.
constexpr std::size_t whole_sectors(std::size_t bytes) {
  return (bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
}
constexpr bool in_sectors(std::uint64_t value) { return value % kSectorBytes == 0; }

}  // namespace tessera
