#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "planner/jitter.h"

namespace tessera {

/// The ways in which ranks differ.
struct WorldOptions {
  /// The relative standard deviation of each entry's seconds (StepProfile::entries), from step to step and from rank to
  /// rank; 0 to 10.
  double jitter = 0;
  std::uint64_t seed = 1;  ///< seed of the random factors; the same options and seed give the same result
  /// [rank]: the factor by which all work of the rank takes longer, above 0 to 1e6. Ranks that are not in the map have
  /// the factor 1.
  std::map<int, double> stragglers = {};
  double stall_share = 0;        ///< share of a rank's steps in which the rank stalls, 0 to 1; the seed chooses these
                                 ///< steps
  double stall_s = 0;            ///< the seconds for which the rank stalls in such a step, 0 to 1e6
  std::int64_t steps = 10;       ///< number of steps that are simulated, 1 to 100000
  std::vector<int> traced = {};  ///< the ranks that a trace shows
};

constexpr int kMostSimulatedRanks = 4096;

/// Returns an error (64) if options are out of range, or if the mesh has more than kMostSimulatedRanks ranks.
absl::Status check_world(const WorldOptions& options, int ranks);

/// The speeds of ranks. Each number is a pure function of its arguments and the options.
class RankSpeeds {
 public:
  /// REQUIRES: check_world(options, ranks).
  RankSpeeds(const WorldOptions& options, int ranks);

  /// Returns the factor by which all work of a rank takes longer.
  double of_work(int rank) const { return of_rank_[static_cast<std::size_t>(rank)]; }
  /// Returns the factor by which one piece of a rank's compute in a step takes longer.
  double of_compute(std::int64_t step, int rank, std::size_t piece) const {
    return of_work(rank) * jitter_.factor(step, rank, piece);
  }
  /// Returns the seconds for which a rank stalls in a step.
  double stall_s(std::int64_t step, int rank) const {
    return stall_share_ > 0 && jitter_.draw(step, rank) < stall_share_ ? stall_s_ : 0.0;
  }

 private:
  Jitter jitter_;
  double stall_share_, stall_s_;
  std::vector<double> of_rank_;
};

}  // namespace tessera
