#pragma once

#include <torch/nn/module.h>

#include "sharding/layout/memory_plan.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

/// plan_memory with all that the plan was made of.
MemoryPlan plan_in_detail(torch::nn::Module& module, const Strategy& strategy, const Topology& topology);

}  // namespace tessera
