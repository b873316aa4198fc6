#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Compares what several ranks hold alike: parameters, masters and optimizer states, of every parameter by a hash of its own. Throws
/// tessera::Error (65), the same on every rank, where two differ: it names the first such parameter and the ranks; where there are
/// three or more, those that are not as most are. All state is read. Between steps; collective over `control`, which has all ranks.
void expect_equal_replicas(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                           Collectives& control, std::int64_t step);

}  // namespace tessera
