#pragma once

#include <torch/nn/module.h>

#include "sharding/layout/plan/memory_plan.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

/// Makes a plan as plan_memory does, but returns the MemoryPlan itself, which also has the numbers from which the plan
/// was computed.
MemoryPlan plan_in_detail(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own_rules = {});

}  // namespace tessera
