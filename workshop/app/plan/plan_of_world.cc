#include "workshop/app/plan/plan_of_world.h"

#include "engine/detailed_plan.h"
#include "runtime/border/throw.h"
#include "tessera/deferred_init.h"
#include "tessera/recompute.h"

namespace tessera::app {
Topology topology_of(const WorldCommand& command) {
  if (command.world_size < 1 || command.hosts < 1 || command.world_size % command.hosts != 0)
    throw Error(ExitCode::kUsage, "plan: --world-size " + std::to_string(command.world_size) +
                                      " ranks do not fill --hosts " + std::to_string(command.hosts) +
                                      " evenly. [T0035] hint: give a multiple of the hosts");
  Topology topology;
  topology.world_size = command.world_size;
  topology.local_world_size = command.world_size / command.hosts;
  topology.launcher = "plan";
  return topology;
}

ModelShapes::ModelShapes(const models::ModelConfig& config) {
  const models::CheckpointFn recompute = [](const auto& segment, const at::Tensor& x) {
    return checkpoint(segment, x);
  };
  model_ = shapes_only([&] { return value_or_throw(models::make_language_model(config, recompute)); });
}

MemoryPlan ModelShapes::plan(const Strategy& strategy, const Topology& topology) const {
  return plan_in_detail(*model_, strategy, topology);
}

PlannedWorld plan_of_world(const WorldCommand& command) {
  PlannedWorld world;
  world.topology = topology_of(command);
  world.strategy = Strategy::from_file(command.strategy);
  world.config = value_or_throw(models::read_model_config(command.model));
  world.plan = ModelShapes(world.config).plan(world.strategy, world.topology);
  return world;
}

}  // namespace tessera::app
