#pragma once

#include <bit>
#include <cstdint>

#include "sharding/layout/placement.h"
#include "sharding/layout/plan/sum_counter.h"
#include "tessera/strategy.h"

namespace tessera {

/// Says which of a step's microbatches a rank computes. They are numbered over all ranks, as TokenBatches deals samples
/// and as the tree of "reproducible" has its leaves.
struct MicrobatchOrder {
  int ranks = 1;
  std::int64_t each = 1;  ///< microbatches of one rank in a step: gradient_accumulation
  /// A rank has neighbours: rank r those from r * each on. False: round i of all ranks together has the microbatches
  /// from i * ranks on.
  bool has_runs = false;

  std::int64_t all() const { return ranks * each; }
  /// Returns the run of a rank. REQUIRES: has_runs.
  TreeBlock run_of(int rank) const { return {rank * each, (rank + 1) * each}; }
  /// Returns the number, within the step, of a rank's microbatch `round`.
  std::int64_t index(int rank, std::int64_t round) const {
    return has_runs ? rank * each + round : round * ranks + rank;
  }
  /// Returns the rank that computes that microbatch, and in which round.
  int rank_of(std::int64_t index) const { return static_cast<int>(has_runs ? index / each : index % ranks); }
  std::int64_t round_of(std::int64_t index) const { return has_runs ? index % each : index / ranks; }
};

/// Whether runs, or the replicas that sum theirs first, cut subtrees of the tree over a step's microbatches. Ranks then
/// send each other the sums of the nodes that their runs consist of, and otherwise one sum, with which the tree over
/// ranks goes on.
inline bool cuts_subtrees(const MicrobatchOrder& order, const MeshPosition& mesh) {
  const auto is_power_of_two = [](std::int64_t number) {
    return std::has_single_bit(static_cast<std::uint64_t>(number));
  };
  if (!order.has_runs || order.ranks == 1) return false;
  return !is_power_of_two(order.each) || (mesh.replicate_size > 1 && !is_power_of_two(mesh.shard_size));
}

/// The order under `strategy` on so many ranks.
inline MicrobatchOrder microbatch_order(const Strategy& strategy, int ranks) {
  return {ranks, strategy.gradient_accumulation,
          strategy.reproducible && strategy.gradient_sync == GradientSync::kLastMicrobatch};
}

}  // namespace tessera
