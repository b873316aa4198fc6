#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// Another deal is worth the change if it shortens a step to less than this share of its time.
constexpr double kWorthOfADeal = 0.97;

/// Returns the seconds that a step takes if ranks have `counts` microbatches. `seconds` [rank]: the time of one
/// microbatch.
inline double seconds_of_deal(std::span<const std::int64_t> counts, std::span<const double> seconds) {
  double longest = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank)
    longest = std::max(longest, static_cast<double>(counts[rank]) * seconds[rank]);
  return longest;
}

/// Returns whether a deal of `counts` is worth the change from a deal of `before`.
inline bool is_worth_a_deal(std::span<const std::int64_t> counts, std::span<const std::int64_t> before,
                            std::span<const double> seconds) {
  return seconds_of_deal(counts, seconds) < kWorthOfADeal * seconds_of_deal(before, seconds);
}

/// Writes to `counts` [rank] how many microbatches of a step each rank gets ("deal" by speed). Each microbatch, one
/// after the other, goes to the rank that would end first with it. No other deal of whole microbatches ends sooner.
inline void share_out(const MicrobatchOrder& order, std::span<const double> seconds, std::span<std::int64_t> counts) {
  std::ranges::fill(counts, 1);
  for (std::int64_t left = order.all() - order.ranks; left > 0; --left) {
    std::size_t best = counts.size();
    const auto end_of = [&](std::size_t rank) { return static_cast<double>(counts[rank] + 1) * seconds[rank]; };
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      if (counts[rank] < order.longest && (best == counts.size() || end_of(rank) < end_of(best))) best = rank;
    }
    ++counts[best];
  }
}

}  // namespace tessera
