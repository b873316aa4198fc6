#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "planner/predicted_step.h"

namespace tessera::testing {

/// Everything on which a step's time depends.
struct TimedPlan {
  PlanInput input;
  StepProfile profile;
  MeshLinks links;

  MemoryPlan plan() const { return MemoryPlan(input); }
  /// Returns the predicted step; the test fails if there is no prediction.
  PredictedStep predicted() const;
};

/// Returns a root unit and `blocks` units of `block_numel` elements of fp32 each, used in their order in forward and
/// the other way in backward. Nothing takes time but forward (1 s a unit), backward (2 s a unit) and, in an update of
/// all elements, 3 s; the rest takes half a second.
TimedPlan timed_plan(ShardingStrategy strategy, MeshPosition mesh, int blocks, std::int64_t block_numel = 1 << 20);

/// Returns links on which all operations take `beta_s_per_byte` seconds for each byte in the background, with latency
/// `alpha_s`.
Links links_of(double beta_s_per_byte, double alpha_s = 0);
/// Returns links in shared memory of a host.
Links shared_memory_links(double beta_s_per_byte, double alpha_s = 0);

/// A strategy and a mesh on which it is timed.
struct StrategyCase {
  std::string name;
  ShardingStrategy strategy;
  MeshPosition mesh;
  bool over_world = false;
};
/// Returns every strategy, on the meshes that it is made for.
std::vector<StrategyCase> all_strategies();
TimedPlan timed_plan(const StrategyCase& strategy, int blocks, std::int64_t block_numel = 1 << 20);

/// A random strategy with random numbers. `text` describes it.
struct RandomPlan {
  TimedPlan timed;
  std::string text;
};
RandomPlan random_plan(std::mt19937_64& random);

/// Returns the seconds that calls take if each runs alone.
double alone_s(const PredictedWire& wire);

}  // namespace tessera::testing
