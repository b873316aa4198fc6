#include "runtime/comm/sum/top_k.h"

#include <algorithm>
#include <array>
#include <bit>

#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {
namespace {

constexpr std::uint32_t kMagnitudeBits = 0x7fffffffu;

TESSERA_INLINE std::uint32_t magnitude(float value) { return std::bit_cast<std::uint32_t>(value) & kMagnitudeBits; }

/// Finds the smallest selected magnitude from its highest bits downwards. Each pass takes the magnitudes that begin
/// with the bits found so far, and counts them by their next bits. The counts give the next bits of the result.
struct Threshold {
  std::uint32_t bits = 0;  ///< bits of the smallest selected magnitude; unknown bits are zeros
  std::size_t equal = 0;   ///< number of selected elements that have these bits
};

template <int kShift, int kWidth>
Threshold refine(const float* values, std::size_t numel, Threshold found) {
  constexpr std::size_t kBins = std::size_t{1} << kWidth;
  // Neighbours have similar magnitudes. Separate counters for neighbours avoid a wait for the previous count.
  constexpr std::size_t kApart = 4;
  std::array<std::array<std::uint32_t, kBins>, kApart> counts{};
  constexpr bool kIsFirst = kShift + kWidth == 31;
  const auto note = [&](std::size_t i) {
    const std::uint32_t bits = magnitude(values[i]);
    if (kIsFirst || bits >> (kShift + kWidth) == found.bits >> (kShift + kWidth))
      ++counts[i % kApart][bits >> kShift & (kBins - 1)];
  };
  std::size_t i = 0;
  for (; i + kApart <= numel; i += kApart) {
    for (std::size_t k = 0; k < kApart; ++k) note(i + k);
  }
  for (; i < numel; ++i) note(i);
  std::size_t left = found.equal, bin = kBins;
  while (bin-- > 0) {
    std::size_t here = 0;
    for (const auto& part : counts) here += part[bin];
    if (here >= left) break;
    left -= here;
  }
  return {found.bits | static_cast<std::uint32_t>(bin) << kShift, left};
}

}  // namespace

void select_largest(const float* values, std::size_t numel, std::size_t count, std::uint32_t* indices) {
  if (count == 0) return;
  Threshold found{0, count};
  found = refine<20, 11>(values, numel, found);
  found = refine<10, 10>(values, numel, found);
  found = refine<0, 10>(values, numel, found);
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = magnitude(values[i]);
    if (bits < found.bits) continue;
    if (bits == found.bits) {
      if (found.equal == 0) continue;
      --found.equal;
    }
    *indices++ = static_cast<std::uint32_t>(i);
  }
}

TESSERA_CPU_CLONES bool all_finite(const float* values, std::size_t numel) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < numel; ++i) largest = std::max(largest, magnitude(values[i]));
  return largest < kInfinity;
}

}  // namespace tessera
