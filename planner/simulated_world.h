#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "planner/step_script.h"

namespace tessera {

/// The ways in which ranks differ.
struct WorldOptions {
  /// The relative standard deviation of each entry's seconds (StepProfile::entries), from step to step and from rank to
  /// rank; 0 to 10.
  double jitter = 0;
  std::uint64_t seed = 1;  ///< seed of the random factors; the same options and seed give the same result
  /// The factor by which all of a rank's work takes longer, by rank; above 0 to 1e6; ranks that are not in the map have
  /// 1.
  std::map<int, double> stragglers = {};
  std::int64_t steps = 10;       ///< 1 to 100000
  std::vector<int> traced = {};  ///< the ranks that SimulatedWorld::trace shows
};

/// Steps of a world of ranks that are not alike.
struct SimulatedWorld {
  static constexpr int kMostRanks = 4096;

  /// Seconds of each step, from the moment when the last rank ended the step before until the last rank has ended this
  /// one.
  std::vector<double> seconds;
  double mean_s = 0;
  /// The numbers of seconds that 10 %, and 90 %, of the steps do not exceed.
  double p10_s = 0, p90_s = 0;
  std::string trace;  ///< StepTrace::events_as_json of the traced ranks
};

/// Simulates what predict_step does, but for each rank of the plan's mesh separately. A call begins when the last of
/// its ranks has joined it, and ends for all of them at once. In shared memory each rank does its share of a sum when
/// all have started it. A rank that has ended a step begins the next one without waiting for others. If ranks are
/// alike, a step takes what predict_step says, to the last bit.
///
/// Costs: ranks x entries events a step; each event costs the logarithm of the number of ranks.
///
/// Errors: those of predict_step; 64 for options that are out of range, and for a mesh of more than kMostRanks ranks.
absl::StatusOr<SimulatedWorld> simulate_world(const MemoryPlan& plan, const StepProfile& profile,
                                              const MeshLinks& links, const WorldOptions& options);

}  // namespace tessera
