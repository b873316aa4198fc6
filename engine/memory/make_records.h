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

/// What records are made from.
struct RecordSources {
  const MemoryPlan& plan;
  const std::vector<std::unique_ptr<Unit>>& units;
  const MeshAxes& axes;
  const std::vector<std::string>& directories;  ///< of files
  DeviceKernels* kernels;                       ///< of the GPU that trains, whose host has the memory; null on the CPU
  DurableFiles* durable;                        ///< knows the files; may be null

  int rank() const { return axes.world->rank(); }
};

/// Makes what of `memory` lies below memory, as the plan says: files, or pinned memory of a GPU's host. Groups are told of their records.
/// REQUIRES: groups have their parts, and the numbers of their tensor states. Collective where gradients of a GPU lie below it. Throws
/// tessera::Error: 73, 74, 77 if a directory cannot be used.
void make_records(TrainingMemory& memory, const RecordSources& from);

}  // namespace tessera
