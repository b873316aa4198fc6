#pragma once

#include <cstddef>
#include <span>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Shows `sums[0, numel)`, which are elements `offset...` of an output, to `visitor` (which may be null), in pieces
/// of 16 KiB. REQUIRES: offset is a multiple of SumVisitor::kAlignment.
void visit_sums(SumVisitor* visitor, std::size_t offset, const float* sums, std::size_t numel);

/// pairwise_sum (pairwise_sum.h) into `output[offset, offset + numel)`, each piece of which is shown to `visitor`
/// (which may be null) as soon as it is there. `sources` begin at what belongs to `output[offset]`.
/// REQUIRES: as pairwise_sum and visit_sums.
void visited_sum(std::span<const void* const> sources, DType dtype, float* output, std::size_t offset,
                 std::size_t numel, SumVisitor* visitor);

}  // namespace tessera
