#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/memory/training_memory.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Makes what of `memory` lies below memory, as the plan says: files in `directories`, which `durable` knows unless that is null, or pinned memory
/// of the host of the GPU whose `kernels` those are. Groups are told of their records. REQUIRES: groups have their parts, and the numbers of their
/// tensor states. Collective where gradients of a GPU lie below it. Throws tessera::Error: 73, 74, 77 if a directory cannot be used.
void make_records(TrainingMemory& memory, const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                  const MeshAxes& axes, const std::vector<std::string>& directories, DeviceKernels* kernels,
                  DurableFiles* durable);

}  // namespace tessera
