#include "runtime/comm/sum/pairwise_sum.h"

#include <absl/container/inlined_vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "runtime/base/seeded_fault.h"
#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {
namespace {

constexpr int kFused = 8;             // number of sources that are summed in registers
constexpr std::size_t kBlock = 1024;  // number of partial sums in an array; it stays in the first-level cache
constexpr std::size_t kGroup = 64;    // number of elements between prefetches
constexpr std::size_t kAhead = 2048;  // bytes to a prefetched element; hardware prefetchers stop at a page's edge

struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

TESSERA_INLINE float widen(float value) { return value; }

TESSERA_INLINE float widen(BF16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

// Widens without branches, so that loops vectorise. Exponent and mantissa move into place and the exponent is rebiased.
// Infinities and NaNs need the bias twice, and one exact subtraction normalises subnormals.
TESSERA_INLINE float widen(F16 value) {
  constexpr std::uint32_t kExponent = 0x7c00u << 13, kRebias = (127u - 15u) << 23;
  constexpr float kSmallestNormal = std::bit_cast<float>(113u << 23);
  const std::uint32_t moved = (value.bits & 0x7fffu) << 13;
  const std::uint32_t exponent = moved & kExponent;
  const std::uint32_t normal = moved + kRebias + (exponent == kExponent ? kRebias : 0u);
  const float subnormal = std::bit_cast<float>(moved + kRebias + (1u << 23)) - kSmallestNormal;
  const std::uint32_t magnitude = exponent == 0 ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(magnitude | (static_cast<std::uint32_t>(value.bits & 0x8000u) << 16));
}

template <int First, int Count, typename T>
TESSERA_INLINE float tree(const std::array<const T*, kFused>& sources, std::size_t i) {
  if constexpr (Count == 1) {
    return widen(sources[First][i]);
  } else {
    constexpr int kLeft = std::bit_floor(static_cast<unsigned>(Count - 1));
    return tree<First, kLeft>(sources, i) + tree<First + kLeft, Count - kLeft>(sources, i);
  }
}

template <int Count, typename T>
TESSERA_INLINE void sum_fused(const void* const* sources, float* output, std::size_t numel) {
  std::array<const T*, kFused> typed{};
  for (int k = 0; k < Count; ++k) typed[k] = static_cast<const T*>(sources[k]);
  std::size_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) {
    for (int k = 0; k < Count; ++k)
      for (std::size_t j = 0; j < kGroup; j += 64 / sizeof(T))
        __builtin_prefetch(typed[k] + i + j + kAhead / sizeof(T));
        // Each element is read before it is written, and only once, so an output that is a source is harmless.
#pragma GCC ivdep
    for (std::size_t j = 0; j < kGroup; ++j) output[i + j] = tree<0, Count>(typed, i + j);
  }
#pragma GCC ivdep
  for (; i < numel; ++i) output[i] = tree<0, Count>(typed, i);
}

template <typename T>
TESSERA_INLINE void sum_few(const void* const* sources, int count, float* output, std::size_t numel) {
  switch (count) {
    case 1:
      return sum_fused<1, T>(sources, output, numel);
    case 2:
      return sum_fused<2, T>(sources, output, numel);
    case 3:
      return sum_fused<3, T>(sources, output, numel);
    case 4:
      return sum_fused<4, T>(sources, output, numel);
    case 5:
      return sum_fused<5, T>(sources, output, numel);
    case 6:
      return sum_fused<6, T>(sources, output, numel);
    case 7:
      return sum_fused<7, T>(sources, output, numel);
    default:
      return sum_fused<8, T>(sources, output, numel);
  }
}

TESSERA_CPU_CLONES void sum_few_f32(const void* const* sources, int count, float* output, std::size_t numel) {
  sum_few<float>(sources, count, output, numel);
}
TESSERA_CPU_CLONES void sum_few_bf16(const void* const* sources, int count, float* output, std::size_t numel) {
  sum_few<BF16>(sources, count, output, numel);
}
TESSERA_CPU_CLONES void sum_few_f16(const void* const* sources, int count, float* output, std::size_t numel) {
  sum_few<F16>(sources, count, output, numel);
}

using SumFew = void (*)(const void* const*, int, float*, std::size_t);

SumFew kernel_of(DType dtype) {
  return dtype == DType::kF32 ? sum_few_f32 : dtype == DType::kBF16 ? sum_few_bf16 : sum_few_f16;
}

// Sums more sources than fit into registers. It sums each half of the tree into its own blocks, since the output may be
// a source that the right half still reads.
void sum_many(SumFew sum_few, const void* const* sources, int count, float* output, std::size_t numel) {
  if (count <= kFused) return sum_few(sources, count, output, numel);
  std::array<float, kBlock> left, right;
  const int left_count = seeded_fault(SeededFault::kSumSplitInTheMiddle)
                             ? count / 2
                             : static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
  sum_many(sum_few, sources, left_count, left.data(), numel);
  sum_many(sum_few, sources + left_count, count - left_count, right.data(), numel);
  const std::array<const void*, 2> halves = {left.data(), right.data()};
  sum_few_f32(halves.data(), 2, output, numel);
}

void sum_in_blocks(std::span<const void* const> sources, DType dtype, float* output, std::size_t numel) {
  absl::InlinedVector<const void*, 16> at(sources.size());
  for (std::size_t begin = 0; begin < numel; begin += kBlock) {
    for (std::size_t k = 0; k < at.size(); ++k)
      at[k] = static_cast<const std::byte*>(sources[k]) + begin * size_of(dtype);
    const auto length = std::min(kBlock, numel - begin);
    sum_many(kernel_of(dtype), at.data(), static_cast<int>(at.size()), output + begin, length);
  }
}

}  // namespace

void pairwise_sum(std::span<const void* const> sources, DType dtype, float* output, std::size_t numel) {
  if (sources.size() <= kFused)
    return kernel_of(dtype)(sources.data(), static_cast<int>(sources.size()), output, numel);
  sum_in_blocks(sources, dtype, output, numel);
}

}  // namespace tessera
