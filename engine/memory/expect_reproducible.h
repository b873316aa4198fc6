#pragma once

#include <torch/nn/module.h>

#include "engine/memory/make_plan.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

// Checks what "reproducible" needs of the mesh, the device, the transport and the module. Strategy keys that it
// excludes are in runtime/config/rules/reproducible_rules.cc. Each function throws tessera::Error (78) with what cannot
// be kept, and does nothing without "reproducible".

/// The sums that ranks make must be those of the tree over all microbatches (SumCounter). The function make_plan calls
/// it, so that `tessera plan` refuses what an Engine would refuse.
void expect_reproducible(const Strategy& strategy, const PlanScene& scene);

/// Transports must add in the pairwise tree over ranks, whatever hosts they are on.
void expect_pairwise_transport(const Strategy& strategy, const MeshAxes& axes, const Topology& topology);

/// Forward must leave nothing in buffers: running statistics depend on which microbatches a rank had.
void expect_no_running_statistics(const Strategy& strategy, const torch::nn::Module& module);

}  // namespace tessera
