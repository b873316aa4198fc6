#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/memory/training_memory.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

class DeviceKernels;

/// The inputs from which records are made.
struct RecordSources {
  const MemoryPlan& plan;
  const std::vector<std::unique_ptr<Unit>>& units;
  const MeshAxes& axes;
  const std::vector<std::string>& directories;  ///< the directories for files
  DeviceKernels* kernels;                       ///< kernels of the GPU that trains; null on the CPU
  DurableFiles* durable;                        ///< makes the files durable; null without "durable"

  int rank() const { return axes.world->rank(); }
};

/// Makes the records of all offloaded state, as the plan says: in files, or in pinned memory of a GPU's host. It sets
/// the records of `memory` and of each group. TrainingMemory::allocate calls it once. REQUIRES: groups have their parts
/// and the numbers of their tensor states. It is collective where gradients of a GPU are offloaded. Throws
/// tessera::Error: 73, 74 or 77 if a directory cannot be used; 71 if the host has too little pinned memory.
void make_records(TrainingMemory& memory, const RecordSources& from);

}  // namespace tessera
