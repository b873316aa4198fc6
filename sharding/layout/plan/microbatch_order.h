#pragma once

#include <cstdint>

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
  /// Returns the number, within the step, of a rank's microbatch `round`.
  std::int64_t index(int rank, std::int64_t round) const {
    return has_runs ? rank * each + round : round * ranks + rank;
  }
  /// Returns the rank that computes that microbatch, and in which round.
  int rank_of(std::int64_t index) const { return static_cast<int>(has_runs ? index / each : index % ranks); }
  std::int64_t round_of(std::int64_t index) const { return has_runs ? index % each : index / ranks; }
};

/// The order under `strategy` on so many ranks.
inline MicrobatchOrder microbatch_order(const Strategy& strategy, int ranks) {
  return {ranks, strategy.gradient_accumulation,
          strategy.reproducible && strategy.gradient_sync == GradientSync::kLastMicrobatch};
}

}  // namespace tessera
