#pragma once

// See docs/glossary.md: carrier, residency, slot, unit.

#include <memory>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/unit.h"
#include "sharding/whole_tensors.h"

namespace tessera {

class Carrier;
class DeviceGradients;
class DurableFiles;
class GradientRecords;
class MappedCarrier;
class SlotCarrier;
struct Accelerator;

/// The carriers that bring records to memory of the host. A carrier is null where no records of its kind are offloaded.
struct HostRecords {
  bool are_pinned = false;  ///< whether a GPU trains, so that records' memory is pinned
  std::shared_ptr<TierCarrier> parameters;
  std::shared_ptr<TierCarrier> states;         ///< masters and optimizer states
  std::shared_ptr<TierCarrier> tensor_states;  ///< states of whole tensors
  std::shared_ptr<GradientRecords> gradients;  ///< gradients, where the CPU trains
};

/// The carriers that bring records from the host's memory to its GPU, with the GPU's slots for the records
/// (RecordPool::device_slots). It is empty on the CPU.
struct GpuRecords {
  Arena state_slots, tensor_state_slots, gradient_slots;
  /// Pinned memory of the host (PassPlan::host_copies_bytes); null where the host updates nothing.
  std::shared_ptr<std::byte> host_copies;
  std::int64_t host_copies_bytes = 0;
  std::shared_ptr<SlotCarrier> states;         ///< through `state_slots`; null where the host updates states
  std::shared_ptr<SlotCarrier> tensor_states;  ///< through `tensor_state_slots`
  std::shared_ptr<MappedCarrier> parameters;   ///< for kernels that use parameters where they lie
  std::shared_ptr<DeviceGradients> gradients;  ///< through `gradient_slots`; null where none are offloaded
};

/// All memory of training state: one arena for each category, as large as the plan says. Each group has its part of an
/// arena. The Engine allocates one when it is made, and owns it.
struct TrainingMemory {
  Arena parameters, slots, gradients, buckets, masters, optimizer, scratch;
  Arena matrices;                    ///< buffers in which matrices are exchanged (PassPlan::matrices)
  Arena secondary, secondary_codes;  ///< memory of SecondaryShards; empty where there is no second copy
  Arena weight_copy;                 ///< PassPlan::weight_copy_bytes
  Arena feedback;                    ///< MemoryCategory::kFeedback
  Arena checkpoint;                  ///< host memory for the copy that an asynchronous save writes
  HostRecords records;
  int owners_of_parameters = 1;  ///< how many ranks hold `parameters` together
  int owners_of_slots = 1;       ///< how many ranks hold `slots` together
  GpuRecords gpu;

  /// Allocates what the plan says and gives every group the pointers to its memory. The residency and the reducer later
  /// take their memory from slots, buckets and scratch, and from gradients where units are updated in backward. Groups
  /// whose gradients lie in records get their pointers later. Records lie in files in `directories`, durable ones where
  /// `durable` is not null, or in pinned memory of a GPU's host. It is collective. Throws tessera::Error: 71 where
  /// there is too little memory; 73, 74, 77 where a directory cannot be used.
  static TrainingMemory allocate(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                                 const MeshAxes& axes, const Accelerator& accelerator,
                                 const std::vector<std::string>& directories, DurableFiles* durable = nullptr);
  /// Returns the bytes that were allocated, by category.
  MemoryUse allocated() const;
  /// Returns the carrier of offloaded gradients, of the GPU or the CPU; null where gradients are in memory.
  Carrier* gradient_carrier() const;
  /// Returns the carrier that brings offloaded states of whole tensors to their update; null where all are in memory.
  Carrier* tensor_state_carrier() const;
};

/// Stores the values of a gathered unit after Gathered(kWrite): rank 0's values become those of all ranks, in masters
/// and shards. The values of a parameter that was given other memory are stored too, and the parameter is put back into
/// its buffer. Throws tessera::Error (64) where such values have other sizes. It needs one unit of fp32 in host memory
/// beyond the plan while it runs. It is collective over `control` (MeshAxes).
void store_parameters(Unit& unit, Collectives& control);

/// Materialises the tensors that every rank has whole (buffers), moves them to `device`, and gives every rank rank 0's
/// values. It is collective over `control`.
void load_whole_tensors(const NamedTensors& tensors, Collectives& control, c10::Device device);

}  // namespace tessera
