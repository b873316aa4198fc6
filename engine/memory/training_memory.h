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

/// The carriers that bring records to host memory. A carrier is null if no records of its kind are offloaded.
struct HostRecords {
  bool are_pinned = false;  ///< whether a GPU trains; if so, the memory of records is pinned
  std::shared_ptr<TierCarrier> parameters;
  std::shared_ptr<TierCarrier> states;         ///< masters and optimizer states
  std::shared_ptr<TierCarrier> tensor_states;  ///< states of whole tensors
  std::shared_ptr<GradientRecords> gradients;  ///< gradients, if the CPU trains
};

/// The carriers that bring records from the host's memory to its GPU, with the GPU's slots for the records
/// (RecordPool::device_slots). All members are empty on the CPU.
struct GpuRecords {
  Arena state_slots, tensor_state_slots, gradient_slots;
  /// Pinned memory for copies of gradients and parameters (PassPlan::host_copies_bytes); null if the host's CPU updates
  /// nothing.
  std::shared_ptr<std::byte> host_copies;
  std::int64_t host_copies_bytes = 0;
  std::shared_ptr<SlotCarrier> states;         ///< uses `state_slots`; null if the host's CPU updates states
  std::shared_ptr<SlotCarrier> tensor_states;  ///< uses `tensor_state_slots`
  std::shared_ptr<MappedCarrier> parameters;   ///< for kernels that use parameters in the host's memory
  std::shared_ptr<DeviceGradients> gradients;  ///< uses `gradient_slots`; null if no gradients are offloaded
};

/// All memory of training state: one arena for each category, as large as the plan says. Each group has its part of an
/// arena. The Engine makes a TrainingMemory while the Engine itself is made, and owns it.
struct TrainingMemory {
  Arena parameters, slots, gradients, buckets, masters, optimizer, scratch;
  Arena matrices;                    ///< buffers in which matrices are exchanged (PassPlan::matrices)
  Arena secondary, secondary_codes;  ///< memory of SecondaryShards; empty if there is no second copy
  Arena weight_copy;                 ///< PassPlan::weight_copy_bytes
  Arena feedback;                    ///< MemoryCategory::kFeedback
  Arena checkpoint;                  ///< host memory for the copy from which an asynchronous save writes
  HostRecords records;
  int owners_of_parameters = 1;  ///< number of ranks that hold `parameters` together
  int owners_of_slots = 1;       ///< number of ranks that hold `slots` together
  GpuRecords gpu;

  /// Allocates the memory of the plan, and gives every group the pointers to its memory. The residency and the reducer
  /// later take their memory from slots, buckets and scratch; if units are updated in backward, also from gradients.
  /// Groups whose gradients lie in records get their pointers later. Records lie in files in `directories`, or in
  /// pinned memory of a GPU's host. The files are durable if `durable` is not null. It is collective. Throws
  /// tessera::Error: 71 if there is too little memory; 73, 74 or 77 if a directory cannot be used.
  static TrainingMemory allocate(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                                 const MeshAxes& axes, const Accelerator& accelerator,
                                 const std::vector<std::string>& directories, DurableFiles* durable = nullptr);
  /// Returns the bytes that were allocated, by category.
  MemoryUse allocated() const;
  /// Returns the carrier that brings offloaded gradients to the device that trains; null if gradients are in memory.
  Carrier* gradient_carrier() const;
  /// Returns the carrier that brings offloaded states of whole tensors to their update; null if all of them are in
  /// memory.
  Carrier* tensor_state_carrier() const;
};

/// Copies the values of parameters that a program has made views of the Engine's buffers under Gathered(kWrite), as two
/// parameters whose `data` were exchanged. The parameters then lie in memory of their own, so that storing one of them
/// does not change the value of another. REQUIRES: `units` are gathered. Call it for all units of a guard before the
/// first `store_parameters`.
void separate_given_values(const std::vector<Unit*>& units);

/// Stores the values of a gathered unit after Gathered(kWrite): all ranks get rank 0's values, in masters and shards.
/// The values of a parameter that was given other memory are stored too, and the parameter is put back into its buffer.
/// Throws tessera::Error (64) if such values have other sizes. The call needs host memory for one unit in fp32 beyond
/// the plan. It is collective over `control` (MeshAxes).
void store_parameters(Unit& unit, Collectives& control);

/// Materialises the tensors that every rank holds whole (buffers), moves them to `device`, and gives every rank the
/// values of rank 0. It is collective over `control`.
void load_whole_tensors(const NamedTensors& tensors, Collectives& control, c10::Device device);

}  // namespace tessera
