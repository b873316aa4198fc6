#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// The part of a step's loss that one microbatch adds. Under "reproducible" a rank sends it to the others.
struct MicrobatchLoss {
  double loss = 0.0;    ///< weight * loss, over all losses of the microbatch
  double weight = 0.0;  ///< MicrobatchInfo::weight; 0 where this rank had no batch
};

/// Adds losses up in the tree of a step's sums (SumCounter), whichever ranks computed the microbatches. `of(rank)`
/// returns a rank's microbatches [round]. REQUIRES: begin < end.
template <class OfRank>
MicrobatchLoss sum_of_losses(const MicrobatchOrder& order, const OfRank& of, std::int64_t begin, std::int64_t end) {
  if (end - begin == 1) {
    const int rank = order.rank_of(begin);
    return of(rank)[static_cast<std::size_t>(order.round_of(begin))];
  }
  const auto numel = static_cast<std::uint64_t>(end - begin);
  const std::int64_t middle = begin + static_cast<std::int64_t>(std::bit_floor(numel - 1));
  const MicrobatchLoss left = sum_of_losses(order, of, begin, middle), right = sum_of_losses(order, of, middle, end);
  return {left.loss + right.loss, left.weight + right.weight};
}

}  // namespace tessera
