#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "sharding/layout/plan/memory_plan.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/commands.h"
#include "workshop/models/language_model.h"

namespace tessera::app {

/// The plan of a model for a job that need not run.
struct PlannedWorld {
  Strategy strategy;
  models::ModelConfig config;
  Topology topology;
  MemoryPlan plan;
};

/// A model without memory, from which plans are made. Throws tessera::Error.
class ModelShapes {
 public:
  explicit ModelShapes(const models::ModelConfig& config);
  MemoryPlan plan(const Strategy& strategy, const Topology& topology) const;

 private:
  std::shared_ptr<torch::nn::Module> model_;
};

/// Plans the model for the world. Throws tessera::Error.
PlannedWorld plan_of_world(const WorldCommand& command);
Topology topology_of(const WorldCommand& command);

}  // namespace tessera::app
