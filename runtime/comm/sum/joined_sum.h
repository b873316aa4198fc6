#pragma once

#include <cstddef>
#include <span>

namespace tessera {

/// Writes `output[i] = (((last[i] + waiting[0][i]) + waiting[1][i]) + ...)` for i < numel. In a tree of sums, the last
/// sum is added to the sums that wait for it, the smallest first (sharding/layout/plan/sum_counter.h). Each addition is
/// that of pairwise_sum, so the bits depend only on the values. If `waiting` is empty, `last` is copied. `output` may
/// be `last` or one of `waiting`.
void joined_sum(std::span<const float* const> waiting, const float* last, float* output, std::size_t numel);

}  // namespace tessera
