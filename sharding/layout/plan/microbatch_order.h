#pragma once

// See docs/glossary.md: dealt.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sharding/layout/placement.h"
#include "sharding/layout/plan/sum_counter.h"
#include "tessera/strategy.h"

namespace tessera {

/// A microbatch that two ranks have computed ("deal.backups"): its owner, and another rank, `rank`, which has completed
/// it first. `turn` is the number of such microbatches that `rank` has completed before it in the step.
struct MadeAgain {
  std::int64_t microbatch = 0;
  int rank = 0;
  std::int64_t turn = 0;
};

/// The assignment of a step's microbatches to ranks. Microbatches are numbered over all ranks, in the order in which
/// TokenBatches deals samples. The leaves of the tree of "reproducible" have the same order.
struct MicrobatchOrder {
  int ranks = 1;
  std::int64_t each = 1;  ///< mean number of microbatches of a step for each rank: gradient_accumulation
  /// If it is true, a rank has neighbouring microbatches. Rank r has the microbatches from r * all() / ranks on, or
  /// those that it was dealt. If it is false, the ranks together have the microbatches from i * ranks on in round i.
  bool has_runs = false;
  std::int64_t longest = 0;               ///< above 0: runs are dealt ("deal" by speed), and no run is longer than this
  std::vector<std::int64_t> begins = {};  ///< [rank]: first microbatch of the dealt run; empty: all microbatches are
                                          ///< divided as evenly as possible
  std::int64_t backups = 0;               ///< largest number of other ranks' microbatches that a rank computes
  /// The microbatches of the present step that other ranks than their owners have completed, so that those ranks'
  /// gradients are used. The list is in the order of the microbatches' numbers, and is set once all ranks have it. Its
  /// microbatches are the last ones of their owners' runs.
  std::vector<MadeAgain> made_again = {};
  /// The number of microbatches of a step ("deal.microbatches"), or 0 if each rank has `each` of them. The number need
  /// not be a multiple of `ranks`; `each` is rounded up.
  std::int64_t total = 0;

  std::int64_t all() const { return total > 0 ? total : ranks * each; }
  std::int64_t longest_run() const { return longest > 0 ? longest : each; }
  /// Returns the largest number of rounds of a rank in a step: one for each microbatch of the longest run, and one for
  /// each backup microbatch.
  std::int64_t most_rounds() const { return longest_run() + backups; }
  /// Returns the run of a rank. REQUIRES: has_runs.
  TreeBlock run_of(int rank) const {
    if (begins.empty()) return {rank * all() / ranks, (rank + 1) * all() / ranks};
    const auto place = static_cast<std::size_t>(rank);
    return {begins[place], rank + 1 < ranks ? begins[place + 1] : all()};
  }
  /// Returns the part of a rank's run that no other rank has completed.
  TreeBlock kept_of(int rank) const {
    TreeBlock kept = run_of(rank);
    const auto first = std::ranges::lower_bound(made_again, kept.begin, {}, &MadeAgain::microbatch);
    if (first != made_again.end()) kept.end = std::min(kept.end, first->microbatch);
    return kept;
  }
  /// Returns the number of microbatches that a rank is given in a step.
  std::int64_t count_of(int rank) const { return has_runs ? run_of(rank).numel() : each; }
  /// Returns the number, within the step, of a rank's microbatch `round`.
  std::int64_t index(int rank, std::int64_t round) const {
    return has_runs ? run_of(rank).begin + round : round * ranks + rank;
  }
  /// These functions return the rank that computes microbatch `index` of the step (rank_of), and the round in which it
  /// does so (round_of).
  int rank_of(std::int64_t index) const {
    if (const MadeAgain* const again = again_of(index)) return again->rank;
    return owner_of(index);
  }
  std::int64_t round_of(std::int64_t index) const {
    if (const MadeAgain* const again = again_of(index)) return longest_run() + again->turn;
    return has_runs ? index - run_of(owner_of(index)).begin : index / ranks;
  }
  /// Returns the rank that was given microbatch `index`.
  int owner_of(std::int64_t index) const {
    if (begins.empty()) return static_cast<int>(has_runs ? ((index + 1) * ranks - 1) / all() : index % ranks);
    return static_cast<int>(std::ranges::upper_bound(begins, index) - begins.begin()) - 1;
  }
  /// Returns the entry of `made_again` for microbatch `index`; null if the rank that was given the microbatch has
  /// completed it.
  const MadeAgain* again_of(std::int64_t index) const {
    const auto found = std::ranges::lower_bound(made_again, index, {}, &MadeAgain::microbatch);
    return found != made_again.end() && found->microbatch == index ? &*found : nullptr;
  }
};

/// Returns whether the runs of ranks are not whole subtrees of the tree over a step's microbatches. (If replicas first
/// add up their runs, the joined runs count instead.) If the result is true, ranks send each other the sums of all
/// nodes of which their runs consist. Otherwise each rank sends one sum, and the tree continues over the ranks' sums.
inline bool cuts_subtrees(const MicrobatchOrder& order, const MeshPosition& mesh) {
  const auto is_power_of_two = [](std::int64_t number) {
    return std::has_single_bit(static_cast<std::uint64_t>(number));
  };
  if (!order.has_runs || order.ranks == 1) return false;
  if (order.longest > 0) return true;
  return !is_power_of_two(order.each) || (mesh.replicate_size > 1 && !is_power_of_two(mesh.shard_size));
}

/// Returns the order under `strategy` on `ranks` ranks. If microbatches are dealt, this is the order of the first
/// steps.
inline MicrobatchOrder microbatch_order(const Strategy& strategy, int ranks) {
  const std::int64_t total = strategy.deal.by == DealBy::kSpeed ? strategy.deal.microbatches : 0;
  const std::int64_t each = total > 0 ? (total + ranks - 1) / ranks : strategy.gradient_accumulation;
  if (strategy.deal.by == DealBy::kSpeed && ranks > 1) {
    MicrobatchOrder order{ranks, each, /*has_runs=*/true};
    order.backups = strategy.deal.backups;
    order.total = total;
    const std::int64_t wanted = strategy.deal.longest > 0 ? strategy.deal.longest : 2 * each;
    order.longest = std::clamp<std::int64_t>(order.all() - (ranks - 1), 1, wanted);
    return order;
  }
  return {ranks, each, strategy.reproducible && strategy.gradient_sync == GradientSync::kLastMicrobatch};
}

}  // namespace tessera
