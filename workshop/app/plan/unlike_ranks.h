#pragma once

#include <cstdint>

#include "planner/mode_world.h"
#include "planner/simulated_world.h"
#include "workshop/app/commands.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"

namespace tessera::app {

/// Reads how ranks differ. Throws tessera::Error (64) if a text does not have the form that its option needs.
WorldOptions options_of(const UnlikeRanks& ranks);

/// Simulates ranks that wait for each other in each step. Throws tessera::Error as simulate_world does.
SimulatedWorld simulated(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options);

/// A simulated run of ranks with clocks of their own, or of replicas that meet at outer steps.
struct SimulatedMode {
  ModeCost cost;
  int ranks = 1;           ///< ranks_of_mode
  std::int64_t steps = 1;  ///< number of steps; each has as many gradients as there are ranks
  ModeWorld run;

  double seconds() const { return run.seconds / static_cast<double>(steps); }  ///< seconds of a step
};
/// Simulates ranks with clocks of their own, or replicas that meet at outer steps (simulate_mode). Replicas train to
/// the end of a period of sync.every steps, so that the mean time of a step has its whole share of the outer step's
/// time. Throws tessera::Error as mode_cost_of and simulate_mode do.
SimulatedMode simulated_mode(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& of_ranks);

}  // namespace tessera::app
