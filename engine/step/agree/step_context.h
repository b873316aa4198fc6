#pragma once

#include <memory>
#include <vector>

#include "engine/memory/training_memory.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/reduce/reducer.h"
#include "sharding/unit.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"

namespace tessera {

class Publication;

/// The inputs from which a step and its parts are made. The step and its parts may keep a copy: the Engine owns
/// everything to which the copy refers, and outlives the step.
struct StepContext {
  const std::vector<std::unique_ptr<Unit>>& units;
  const Strategy& strategy;
  const MemoryPlan& plan;
  const MeshAxes& axes;
  const TrainingMemory& memory;  ///< holds the records of offloaded state
  const OwnRules& own_rules;
  const Reducer& reducer;
  Publication* behind;  ///< the CPU's Publisher uses it; null: values are published before the step returns
  /// World rank of the first rank of `axes.world`. It can differ from 0 only if replicas train apart.
  int first_rank = 0;
  /// The number of replicas that train apart; 1 where all ranks make one step.
  int replicas = 1;
};

}  // namespace tessera
