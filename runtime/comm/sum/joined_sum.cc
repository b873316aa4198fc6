#include "runtime/comm/sum/joined_sum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/comm/sum/pairwise_sum.h"

namespace tessera {

void joined_sum(std::span<const float* const> waiting, const float* last, float* output, std::size_t numel) {
  if (waiting.empty()) {
    if (output != last) std::memcpy(output, last, numel * sizeof(float));
    return;
  }
  constexpr std::size_t kBlock = 1024;  // number of elements of `between`, which stays in the first-level cache
  alignas(64) std::array<float, kBlock> between;
  for (std::size_t begin = 0; begin < numel; begin += kBlock) {
    const std::size_t length = std::min(kBlock, numel - begin);
    const float* sum = last + begin;
    for (std::size_t k = 0; k < waiting.size(); ++k) {
      // Only the last addition writes the output, which may be one of the sums that still wait.
      float* const to = k + 1 == waiting.size() ? output + begin : between.data();
      pairwise_sum(std::array<const void*, 2>{waiting[k] + begin, sum}, DType::kF32, to, length);
      sum = to;
    }
  }
}

}  // namespace tessera
