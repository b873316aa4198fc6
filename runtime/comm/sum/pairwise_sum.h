#pragma once

#include <cstddef>
#include <span>

#include "tessera/dtype.h"

namespace tessera {

/// Computes `output[i] = sum over k of float(sources[k][i])` for i < numel, in the pairwise tree of collectives.h rule
/// 3. Let 2^j be the largest power of two below the number of sources. The sum of the first 2^j sources is added to the
/// sum of the others. Each of these two sums is made in the same way. Sums are in fp32 without fused multiply-add. The
/// bits therefore depend only on the values and the number of sources. They do not depend on the instruction set, nor
/// on where a run of elements is cut.
///
/// The sum is one pass: every source is read once, and the output is written once. `output` may be one of the sources.
/// REQUIRES: dtype is fp32, bf16 or fp16; at least one source; pointers aligned to their element.
void pairwise_sum(std::span<const void* const> sources, DType dtype, float* output, std::size_t numel);

/// Returns whether `pairwise_sum`, and so every reduction, accepts a dtype.
constexpr bool is_reducible(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

}  // namespace tessera
