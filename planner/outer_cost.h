#pragma once

#include "planner/predicted_step.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// The cost of outer steps (SyncConfig), as a mean over the steps between them.
struct OuterCost {
  double exposed_s = 0;            ///< waiting for other replicas, and for the other ranks of this replica
  PredictedWire shard, replicate;  ///< calls and bytes of a step, rounded up
};

/// Returns the cost for a plan with outer steps. local_sgd and diloco wait for all sums of an outer step;
/// streaming_diloco waits for what remains of a fragment's sum after `delay` steps of `step_s` seconds. Outer gradients
/// are sent in fewer bits if "compression" says so and the wire reduces in the background, as a
/// network does. `links.replicate`: links between ranks of different replicas.
OuterCost outer_cost(const MemoryPlan& plan, double step_s, const MeshLinks& links);

}  // namespace tessera
