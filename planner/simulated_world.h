#pragma once

// See docs/glossary.md: dealt.

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "planner/rank_speeds.h"
#include "planner/step_script.h"

namespace tessera {

/// Steps of a world of ranks that are not alike.
struct SimulatedWorld {
  /// Seconds of each step, from the moment when the last rank ended the step before until the last rank has ended this
  /// one.
  std::vector<double> seconds;
  double mean_s = 0;
  /// The numbers of seconds that 10 %, and 90 %, of the steps do not exceed.
  double p10_s = 0, p90_s = 0;
  /// [rank]: the microbatches of a step that each rank computes, as they are once they are dealt by the ranks' speeds
  /// ("deal"). It is empty elsewhere.
  std::vector<std::int64_t> dealt;
  std::string trace;  ///< StepTrace::events_as_json of the traced ranks
};

/// Simulates what predict_step does, but for each rank of the plan's mesh separately. A call begins when the last of
/// its ranks has joined it, and ends for all of them at once. In shared memory each rank does its share of a sum when
/// all have started it. A rank that has ended a step begins the next one without waiting for others. If ranks are
/// alike, a step takes what predict_step says, to the last bit. Microbatches that are dealt by speed are so from the
/// first step on. A rank that stands still does so before it first computes in the step.
///
/// Costs: ranks x entries events a step; each event costs the logarithm of the number of ranks.
///
/// Errors: those of predict_step; those of check_world.
absl::StatusOr<SimulatedWorld> simulate_world(const MemoryPlan& plan, const StepProfile& profile,
                                              const MeshLinks& links, const WorldOptions& options);

}  // namespace tessera
