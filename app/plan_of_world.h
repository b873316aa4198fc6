#pragma once

#include "app/commands.h"
#include "models/language_model.h"
#include "sharding/layout/memory_plan.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera::app {

/// The plan of a model for a world that is not there.
struct PlannedWorld {
  Strategy strategy;
  models::ModelConfig config;
  Topology topology;
  MemoryPlan plan;
};

/// Throws tessera::Error.
PlannedWorld plan_of_world(const WorldCommand& command);
/// With another strategy.
MemoryPlan plan_of(const models::ModelConfig& config, const Strategy& strategy, const Topology& topology);

}  // namespace tessera::app
