#include "sharding/reduce/pack/squared_copy.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kBlock = 4096;  // number of elements of a block; a copied block is still in the nearest cache
                                       // when it is squared

/// Adds up squares in lanes: element i goes to lane i mod kLanes, and lanes are added by halves. The order is the same
/// with every instruction set.
template <class T>
TESSERA_INLINE double squares_of(const T* values, std::int64_t numel) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double x = static_cast<float>(values[i + lane]);
      lanes[lane] += x * x;
    }
  }
  for (std::int64_t lane = 0; i + lane < numel; ++lane) {
    const double x = static_cast<float>(values[i + lane]);
    lanes[lane] += x * x;
  }
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

TESSERA_CPU_CLONES double squares_of_f32(const float* values, std::int64_t numel) { return squares_of(values, numel); }
TESSERA_CPU_CLONES double squares_of_bf16(const c10::BFloat16* values, std::int64_t numel) {
  return squares_of(values, numel);
}
double squares_of_f16(const c10::Half* values, std::int64_t numel) { return squares_of(values, numel); }

double squares_of_block(const std::byte* values, DType dtype, std::int64_t numel) {
  if (dtype == DType::kBF16) return squares_of_bf16(reinterpret_cast<const c10::BFloat16*>(values), numel);
  if (dtype == DType::kF16) return squares_of_f16(reinterpret_cast<const c10::Half*>(values), numel);
  return squares_of_f32(reinterpret_cast<const float*>(values), numel);
}

template <class BeforeBlock>
double over_blocks(const std::byte* values, DType dtype, std::int64_t numel, const BeforeBlock& before) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  double sum = 0;
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - begin);
    before(begin * element, static_cast<std::size_t>(count * element));
    sum += squares_of_block(values + begin * element, dtype, count);
  }
  return sum;
}

}  // namespace

double sum_of_squares(const std::byte* values, DType dtype, std::int64_t numel) {
  return over_blocks(values, dtype, numel, [](std::int64_t, std::size_t) {});
}

double squared_copy(std::byte* to, const std::byte* from, DType dtype, std::int64_t numel) {
  return over_blocks(to, dtype, numel,
                     [&](std::int64_t begin, std::size_t bytes) { std::memcpy(to + begin, from + begin, bytes); });
}

}  // namespace tessera
