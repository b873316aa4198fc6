#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// Another deal is worth the change if it shortens a step to less than this share of its time.
constexpr double kWorthOfADeal = 0.97;

/// Returns the seconds that a step takes if ranks have `counts` microbatches. `seconds` [rank] is the time of one
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

/// The progress of a rank's run in a step ("deal.backups"): the number of microbatches completed from its beginning,
/// and the number that other ranks have claimed from its end.
struct RunProgress {
  std::int64_t ended = 0, claimed = 0;
};

/// A rank claims a microbatch of another rank if that rank's remaining microbatches will take this many times as long
/// as one microbatch takes here.
constexpr double kOvertakes = 1.5;

/// Returns the rank that will probably be the last to complete its run, if it is slow enough for rank `self` to help
/// (kOvertakes) and has a microbatch that no rank has claimed. `computed` is the number of microbatches that `self` has
/// computed. All ranks began the step together, so the number of microbatches that they have completed since then shows
/// how fast they are. `progress_of(rank)` returns a RunProgress.
template <class ProgressOf>
std::optional<int> rank_to_help(const MicrobatchOrder& order, int self, std::int64_t computed,
                                const ProgressOf& progress_of) {
  std::optional<int> found;
  double longest = kOvertakes / static_cast<double>(computed);  // as a multiple of the time since the step began
  for (int rank = 0; rank < order.ranks; ++rank) {
    if (rank == self) continue;
    const RunProgress now = progress_of(rank);
    const std::int64_t open = order.run_of(rank).numel() - now.ended - now.claimed;
    if (open <= 0) continue;
    // On average, the rank has completed half of its current microbatch.
    const double left = (static_cast<double>(open) - 0.5) / static_cast<double>(std::max<std::int64_t>(now.ended, 1));
    if (left <= longest) continue;
    longest = left;
    found = rank;
  }
  return found;
}

}  // namespace tessera
