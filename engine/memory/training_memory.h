#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/unit.h"
#include "sharding/whole_tensors.h"

namespace tessera {

class DeviceGradients;
class DurableFiles;
class GradientRecords;
class GradientStore;
struct Accelerator;

/// All memory of training state: one arena a category, each as large as the plan says, and each piece given to the
/// group it is for.
struct TrainingMemory {
  Arena parameters, slots, gradients, buckets, masters, optimizer, scratch;
  Arena matrices;                          ///< where they are exchanged (MemoryPlan::matrices)
  Arena weight_copy;                       ///< MemoryPlan::weight_copy_bytes
  Arena feedback;                          ///< MemoryCategory::kFeedback
  Arena checkpoint;                        ///< of the host: what an asynchronous save writes
  Arena record_slots, tensor_state_slots;  ///< of a GPU: through which its host's records go (RecordPool::device_slots)
  /// Of its host, pinned: MemoryPlan::host_copies_bytes; null where nothing is updated there.
  std::shared_ptr<std::byte> host_copies;
  std::int64_t host_copies_bytes = 0;
  bool records_are_pinned = false;                     ///< they are memory of the host for its GPU
  std::shared_ptr<StateRecords> parameter_records;     ///< null where no parameters lie below memory
  std::shared_ptr<StateRecords> state_records;         ///< and no masters and states
  std::shared_ptr<StateRecords> tensor_state_records;  ///< and no states of whole tensors
  std::shared_ptr<GradientRecords> gradient_records;   ///< and no gradients of the CPU
  Arena gradient_slots;  ///< of a GPU, for the sums of units that have theirs below (RecordPool::device_slots)
  std::shared_ptr<DeviceGradients> device_gradients;  ///< null where no gradients of a GPU lie below its memory
  int owners_of_parameters = 1;                       ///< ranks that hold `parameters` together
  int owners_of_slots = 1;                            ///< likewise

  /// Allocates the plan and points every group at its parts. Slots, buckets and scratch, and gradients where units are
  /// updated in backward, are left for the residency and the reducer to take; gradients in records are pointed at later. Records lie in `directories`, in files that `durable` knows
  /// unless that is null. A GPU gives memory of its host for records. Collective.
  /// Throws tessera::Error: 73, 74, 77 if such a directory cannot be used.
  static TrainingMemory allocate(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                                 const MeshAxes& axes, const Accelerator& accelerator,
                                 const std::vector<std::string>& directories, DurableFiles* durable = nullptr);
  MemoryUse allocated() const;
  /// Of either; null where gradients lie in memory.
  GradientStore* gradient_store() const;
};

/// Makes rank 0's values, gathered now (after Gathered::kWrite), everybody's: writes masters and shards. A parameter that
/// was given other memory gives its values and is put back. Throws tessera::Error (64) where those have other sizes. Needs
/// one unit of fp32 in host memory beyond the plan while it runs. Collective over `control` (MeshAxes).
void store_parameters(Unit& unit, Collectives& control);

/// Materialises what every rank has whole, moves it to `device` and gives every rank rank 0's. Collective over `control`.
void load_whole_tensors(const NamedTensors& tensors, Collectives& control, c10::Device device);

}  // namespace tessera
