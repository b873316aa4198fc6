#pragma once

#include <cstdint>
#include <vector>

#include "planner/modes/mode_clock.h"
#include "planner/predicted_step.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// The cost of outer steps (SyncConfig), as a mean over the steps between them.
struct OuterCost {
  double exposed_s = 0;                  ///< seconds of waiting for other replicas and other ranks of this replica
  PredictedWire shard, replicate;        ///< calls and bytes for each step, rounded up
  std::vector<FragmentCosts> fragments;  ///< costs of the meetings in `every` steps; empty if there is one replica
  std::int64_t delay = 0;                ///< number of steps during which a fragment is summed
};

/// Returns the cost for a plan with outer steps. Ranks wait for all sums of an outer step if the type is local_sgd or
/// diloco. If it is streaming_diloco, they wait only for the part of a fragment's sum that remains after `delay` steps
/// of `step_s` seconds. If sums cannot be made while ranks compute, as in shared memory, they wait for whole sums.
/// Outer gradients are sent in fewer bits if "compression" requires this and the transport reduces in the background,
/// as over a network. `links.replicate`: links between ranks of different replicas.
OuterCost outer_cost(const MemoryPlan& plan, double step_s, const MeshLinks& links);

}  // namespace tessera
