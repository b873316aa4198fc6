#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "planner/predicted_step.h"

namespace tessera::testing {

/// Everything that determines the time of a step.
struct TimedPlan {
  PlanInput input;
  StepProfile profile;
  MeshLinks links;

  MemoryPlan plan() const { return MemoryPlan(input); }
  /// Returns the predicted step; the test fails if there is no prediction.
  PredictedStep predicted() const;
};

/// Returns a root unit and `blocks` units, each of `block_numel` fp32 elements. Forward uses them in their order, and
/// backward uses them in the opposite order. Forward takes 1 s per unit, backward takes 2 s per unit, an update of all
/// elements takes 3 s, and the rest takes half a second. Nothing else takes time.
TimedPlan timed_plan(ShardingStrategy strategy, MeshPosition mesh, int blocks, std::int64_t block_numel = 1 << 20);

/// Returns links on which each operation takes `alpha_s` seconds, and `beta_s_per_byte` seconds for each byte. All
/// operations run in the background.
Links links_of(double beta_s_per_byte, double alpha_s = 0);
/// Returns links in the shared memory of a host.
Links shared_memory_links(double beta_s_per_byte, double alpha_s = 0);

/// A strategy and a mesh on which it is timed.
struct StrategyCase {
  std::string name;
  ShardingStrategy strategy;
  MeshPosition mesh;
  bool over_world = false;
};
/// Returns every strategy, with the meshes for which it is made.
std::vector<StrategyCase> all_strategies();
TimedPlan timed_plan(const StrategyCase& strategy, int blocks, std::int64_t block_numel = 1 << 20);

/// A random plan with random times. `text` describes both.
struct RandomPlan {
  TimedPlan timed;
  std::string text;
};
RandomPlan random_plan(std::mt19937_64& random);

/// Returns the sum of the seconds that calls take if each call runs alone.
double alone_s(const PredictedWire& wire);

}  // namespace tessera::testing
