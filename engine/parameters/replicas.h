#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Compares what must be equal on several ranks: parameters, masters and optimizer states, by one hash for each
/// parameter. The Engine calls it after every `check.replica_hash_every` steps; it is collective over `control`, which
/// has all ranks. It reads all state. Throws tessera::Error (65), the same on every rank, where ranks differ. The error
/// names the first such parameter and the ranks; where three or more ranks hold the part, it names those that differ
/// from the majority.
void expect_equal_replicas(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                           Collectives& control, std::int64_t step);

}  // namespace tessera
