#pragma once

#include "engine/memory/make_plan.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

// These functions check the mesh, the device, the transport and the module for "reproducible". The strategy keys that
// conflict with "reproducible" are checked in runtime/config/rules/reproducible_rules.cc. Each function throws
// tessera::Error (78), which names the obstacle, and does nothing without "reproducible".

/// Checks that the sums that ranks make are sums of the tree over all microbatches (SumCounter). The function make_plan
/// calls it, so that `tessera plan` refuses the strategies that an Engine would refuse.
void expect_reproducible(const Strategy& strategy, const PlanScene& scene);

/// Checks that the transport adds in the pairwise tree over ranks, whatever hosts the ranks are on.
void expect_pairwise_transport(const Strategy& strategy, const MeshAxes& axes, const Topology& topology);

}  // namespace tessera
