#include "engine/memory/training_memory.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "engine/device/accelerator.h"
#include "engine/device/pinned_memory.h"
#include "engine/memory/durable_files.h"
#include "engine/memory/make_records.h"
#include "engine/memory/master_weights.h"
#include "engine/memory/records/device_gradients.h"
#include "engine/memory/records/gradient_records.h"
#include "engine/memory/records/mapped_carrier.h"
#include "engine/memory/records/slot_carrier.h"
#include "engine/memory/records/tier_carrier.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "tessera/deferred_init.h"

namespace tessera {
namespace {

// This file works as follows. TrainingMemory::allocate makes each arena with the plan's bytes. It then gives each group
// of the units memory from the arenas for its parameters, gradients, masters and states (the place_… functions).
// Offloaded records and durable files get their memory after that (`make_records`, DurableFiles). At the end it checks
// that the groups have got all memory of these arenas. The functions at the end of the file give every rank
// the values of rank 0.

void place_parameters(FlatGroup& group, const MemoryPlan& plan, Arena& arena) {
  group.make_storage();
  group.parameters_below.chunks = plan.parameter_chunks_of(group.shape());
  if (plan.parameters_below()) {
    const std::int64_t numel = group.parameters_below.chunks.before_records();
    if (numel > 0) group.shard = arena.take(numel * group.element_bytes());
    return;
  }
  const Placement& placement = plan.placement();
  const bool whole = placement.shared || group.parameter_part.numel == group.layout.numel();
  const bool in_place = placement.keep_gathered || whole;
  const std::int64_t numel = in_place ? group.layout.numel() : group.parameter_part.numel;
  std::byte* memory = arena.take(numel * group.element_bytes());
  group.shard = in_place ? memory + group.parameter_part.offset * group.element_bytes() : memory;
  if (whole) group.full = memory;  // the group is always gathered
}

void place_masters(FlatGroup& group, MasterKind wanted, Arena& arena) {
  group.master_kind = master_kind_of(wanted, group.dtype);
  if (group.dtype == DType::kF32) return;
  std::byte* memory = arena.take(master_bytes(wanted, group.dtype, group.records.masters_in_memory()));
  if (group.master_kind == MasterKind::kSplitBF16) {
    group.master_low = reinterpret_cast<std::int16_t*>(memory);
  } else {
    group.master = reinterpret_cast<float*>(memory);
  }
}

void place_training_state(FlatGroup& group, TrainingMemory& memory, const MemoryPlan& plan) {
  const bool is_in_memory = !plan.gradients_below() || group.unit->index == 0;
  if (!plan.update().in_backward && is_in_memory) {
    group.gradient = reinterpret_cast<float*>(memory.gradients.take(group.gradient_part.numel * 4));
  }
  place_masters(group, plan.update().master, memory.masters);
  const bool are_on_host = plan.update().outer.has_common_parameters();  // CommonParameters has the states
  for (FlatGroup::State& state : group.state) state.is_on_host = are_on_host;
  if (are_on_host) return;
  const StateFormats& states = group.records.state().states;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const StatePiece piece = state_piece(states[i], group.records.states_in_memory());
    group.state[i].data = memory.optimizer.take(piece.data_bytes);
    if (piece.scale_bytes == 0) continue;
    group.state[i].scales = reinterpret_cast<float*>(memory.optimizer.take(piece.scale_bytes));
  }
}

/// Places the states of whole tensors: states of the first groups in memory, states of the last groups in records.
void place_tensor_states(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units, Arena& arena) {
  std::int64_t index = 0;
  for_each_trainable(units, [&](FlatGroup& group) {
    const std::int64_t numel = group.of_tensors.part.numel;
    if (numel == 0) return;
    if (index < plan.records().tensor_states_in_memory) {
      group.of_tensors.data = reinterpret_cast<float*>(arena.take(numel * 4));
    } else {
      group.of_tensors.record = index - plan.records().tensor_states_in_memory;
    }
    ++index;
  });
}

/// Copies all of a group's values to one flat tensor. It is fp32 if the group's dtype can be trained, so that no bits
/// of the masters are lost.
at::Tensor flatten(const FlatGroup& group, const std::vector<at::Tensor>& values) {
  const DType dtype = is_trainable(group.dtype) ? DType::kF32 : group.dtype;
  const at::Tensor flat = at::zeros({group.layout.numel()}, at::TensorOptions(scalar_type_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const FlatParameter& parameter = group.parameters[i];
    flat.as_strided(parameter.sizes, parameter.strides, group.layout.extent(i).offset).copy_(values[i]);
  }
  return flat;
}

/// Throws if a parameter was given bytes of a wider dtype. torch::load gives a tensor the bytes of the file and does
/// not change the tensor's dtype, so the bytes of an fp32 file would be read as meaningless bf16 values. Such a
/// parameter is recognized by a storage of exactly 2 or 4 times the tensor's size.
void expect_no_wider_bytes(const FlatParameter& parameter, const at::Tensor& value) {
  const std::size_t narrow = value.nbytes(), bytes = value.storage().nbytes();
  if (narrow == 0 || value.storage_offset() != 0 || (bytes != 2 * narrow && bytes != 4 * narrow)) return;
  throw Error(ExitCode::kUsage,
              c10::str("parameter ", parameter.name, " is ", value.scalar_type(), ", but was given memory of ",
                       bytes / narrow, " times its size under ", say(phrases::kWriteGuard),
                       ", as a load does with a file of a wider "
                       "dtype. [T0237] hint: load into a module of the file's dtype, and copy_ its parameters"));
}

/// Returns the value that a program has given a parameter under Gathered(kWrite), wherever the parameter lies now.
at::Tensor value_to_store(const FlatGroup& group, std::size_t i) {
  const FlatParameter& parameter = group.parameters[i];
  const at::Tensor value = parameter.tensor.detach();
  if (is_in_place(group, i)) return value;
  expect_no_wider_bytes(parameter, value);
  if (value.sizes() == at::IntArrayRef(parameter.sizes)) return value;
  throw Error(ExitCode::kUsage,
              c10::str("parameter ", parameter.name, " has sizes ", at::IntArrayRef(parameter.sizes),
                       ", but was given a value of sizes ", value.sizes(), " under ", say(phrases::kWriteGuard),
                       ". [T0238] hint: give a value of the parameter's sizes; a file of another model has others"));
}

/// If a program has given a parameter other memory, makes the parameter a view of its buffer again. A buffer that is
/// always in memory has the stored values already. Other buffers get them from `flat`.
void put_back(FlatGroup& group, std::size_t i, const at::Tensor& flat) {
  if (is_in_place(group, i)) return;
  FlatParameter& parameter = group.parameters[i];
  const std::int64_t offset = group.layout.extent(i).offset;
  rebase(parameter, group, offset);
  if (!group.unit->keeper()) return;
  parameter.tensor.detach().copy_(flat.as_strided(parameter.sizes, parameter.strides, offset));
}

/// Allocates memory for residuals of compression. It is host memory even if a GPU trains.
Arena allocate_feedback(const MemoryPlan& plan, DeviceKernels* kernels, int rank) {
  const std::int64_t copies = plan.wire().compression.restore_skipped ? 2 : 1;
  const std::int64_t bytes = 4 * (plan.sums().method_work_numel + copies * plan.sums().kept_gradient_numel);
  if (!kernels || bytes == 0) return Arena::plain("feedback", bytes);
  const AlignedMemory::Give give = pinned_memory_of(*kernels, rank, "what compression keeps of gradients",
                                                    "[T0806] hint: take a \"compression\" that keeps nothing, or leave "
                                                    "out its \"restore_skipped\", which keeps a copy");
  return Arena::given("feedback", bytes, give(static_cast<std::size_t>(bytes)));
}

void broadcast(const at::Tensor& tensor, const std::string& label, Collectives& control) {
  throw_if_error(control.broadcast(label, tensor.data_ptr(), tensor.nbytes(), 0).wait());
}

}  // namespace

TrainingMemory TrainingMemory::allocate(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                                        const MeshAxes& axes, const Accelerator& accelerator,
                                        const std::vector<std::string>& directories, DurableFiles* durable) {
  const c10::Device device = accelerator.device.device;
  DeviceKernels* const kernels = accelerator.kernels.get();
  const MemoryUse& use = plan.use();
  const PlannedPlacement& placement = plan.placement();
  TrainingMemory memory;
  const bool below = plan.parameters_below();
  const int sharers = placement.shared ? placement.mesh.shard_size : 1;
  memory.owners_of_parameters = below ? 1 : sharers;
  memory.owners_of_slots = below ? sharers : 1;
  const std::int64_t parameters = use[MemoryCategory::kParameters] - plan.secondary_bytes();
  const std::int64_t slots = use[MemoryCategory::kSlots] - plan.secondary_codes_bytes();
  if (plan.has_secondary()) memory.secondary = Arena::shared("second copy", plan.secondary_bytes(), *axes.secondary);
  memory.secondary_codes = Arena::plain("codes of the second copy", plan.secondary_codes_bytes(), device);
  memory.parameters = memory.owners_of_parameters > 1 ? Arena::common("parameters", parameters * sharers, *axes.gather)
                                                      : Arena::shared("parameters", parameters, *axes.gather);
  // The transport of a GPU fills slots by itself, and is fastest in memory that it has registered. If shards are first
  // copied into slots, the transport sends from slots. In both cases slots lie in the transport's memory.
  const bool is_sent_from = below || axes.gather->gpu() != Collectives::kHostMemory;
  memory.slots = memory.owners_of_slots > 1 ? Arena::common("slots", slots * sharers, *axes.gather)
                 : is_sent_from             ? Arena::shared("slots", slots, *axes.gather)
                                            : Arena::plain("slots", slots, device);
  const std::int64_t gradients = use[MemoryCategory::kGradients];
  memory.gradients = axes.readers ? Arena::part_of_common("gradients", gradients, *axes.readers)
                                  : Arena::shared("gradients", gradients, *axes.reduce);
  memory.buckets = Arena::shared("buckets", use[MemoryCategory::kBuckets], *axes.reduce);
  memory.masters = Arena::plain("masters", use[MemoryCategory::kMasters], device);
  // OuterSteps, OwnedShards and MicrobatchStatistics allocate their own memory, so those bytes are subtracted here. If
  // ranks have common parameters, CommonParameters has the states, so none are allocated here.
  const OuterNumel& outer = plan.passes().outer;
  const std::int64_t of_others = placement.is_queued ? 0 : 4 * outer.work + plan.statistics_bytes();
  const std::int64_t scratch = use[MemoryCategory::kStaging] - plan.matrix_bytes() - plan.passes().weight_copy_bytes -
                               4 * outer.staging() - of_others;
  const std::int64_t states =
      plan.update().outer.has_common_parameters() ? 0 : use[MemoryCategory::kOptimizer] - 4 * outer.states;
  memory.optimizer = Arena::plain("optimizer", states, device);
  memory.scratch = Arena::plain("scratch", scratch, device);
  memory.matrices = Arena::plain("matrices", plan.matrix_bytes(), device);
  memory.weight_copy = Arena::plain("a copy of weights", plan.passes().weight_copy_bytes, device);
  memory.feedback = allocate_feedback(plan, kernels, axes.world->rank());
  memory.gpu.state_slots = Arena::plain("records on the device", plan.records().states.device_bytes(), device);
  memory.gpu.tensor_state_slots =
      Arena::plain("states of matrices on the device", plan.records().tensor_states.device_bytes(), device);
  memory.checkpoint = Arena::plain("checkpoint", use[MemoryCategory::kCheckpoint]);
  // Writing makes the system map the pages now, and not while training waits for the copy.
  std::fill_n(memory.checkpoint.data(), memory.checkpoint.bytes(), std::byte{1});
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      const std::int64_t numel = group->layout.numel();
      group->device = device;
      group->parameter_part = owned(placement.parameters, placement.mesh, numel);
      group->gradient_part = owned(placement.gradients, placement.mesh, numel);
      group->optimizer_part = owned(placement.optimizer, placement.mesh, numel);
      place_parameters(*group, plan, memory.parameters);
      if (!group->trainable) continue;
      group->records = plan.records_of(group->shape());
      group->of_tensors.part = plan.tensor_state_part_of(group->shape());
      place_training_state(*group, memory, plan);
    }
  }
  if (!plan.update().outer.has_common_parameters()) place_tensor_states(plan, units, memory.optimizer);
  make_records(memory, {plan, units, axes, directories, kernels, durable});
  if (durable) durable->take_memory(memory, plan, units, device, kernels);
  for (const Arena* arena : {&memory.parameters, &memory.masters, &memory.optimizer}) arena->expect_full();
  if (!plan.update().in_backward) memory.gradients.expect_full();
  return memory;
}

MemoryUse TrainingMemory::allocated() const {
  MemoryUse use;
  use[MemoryCategory::kParameters] = parameters.taken() / owners_of_parameters + secondary.bytes();
  use[MemoryCategory::kSlots] = slots.bytes() / owners_of_slots + secondary_codes.bytes();
  use[MemoryCategory::kGradients] = gradients.bytes();
  use[MemoryCategory::kBuckets] = buckets.bytes();
  use[MemoryCategory::kMasters] = masters.taken();
  use[MemoryCategory::kOptimizer] = optimizer.taken();
  use[MemoryCategory::kStaging] = scratch.bytes() + matrices.bytes() + weight_copy.bytes();
  use[MemoryCategory::kCheckpoint] = checkpoint.bytes();
  use[records.are_pinned ? MemoryCategory::kHostRecords : MemoryCategory::kFeedback] += feedback.bytes();
  use[MemoryCategory::kRecords] = gpu.state_slots.bytes() + gpu.tensor_state_slots.bytes();
  for (const auto& carrier : {records.parameters, records.states, records.tensor_states}) {
    if (!carrier) continue;
    use[records.are_pinned ? MemoryCategory::kHostRecords : MemoryCategory::kRecords] += carrier->memory_bytes();
  }
  use[MemoryCategory::kHostRecords] += gpu.host_copies_bytes;
  if (records.gradients) use[MemoryCategory::kRecords] += records.gradients->memory_bytes();
  use[MemoryCategory::kRecords] += gpu.gradient_slots.bytes();
  if (gpu.gradients) use[MemoryCategory::kHostRecords] += gpu.gradients->memory_bytes();
  return use;
}

Carrier* TrainingMemory::gradient_carrier() const {
  if (gpu.gradients) return gpu.gradients.get();
  return records.gradients.get();
}

Carrier* TrainingMemory::tensor_state_carrier() const {
  if (gpu.tensor_states) return gpu.tensor_states.get();
  return records.tensor_states.get();
}

void separate_given_values(const std::vector<Unit*>& units) {
  const Unrecorded unrecorded;
  const auto lies_in_buffers = [](const FlatGroup& group, const at::Tensor& value) {
    return value.has_storage() &&
           (value.storage().unsafeGetStorageImpl() == group.storage.get() || unit_of(value) != nullptr);
  };
  for (const Unit* unit : units) {
    for_each_parameter(*unit, [&](FlatGroup& group, std::size_t i) {
      at::Tensor& tensor = group.parameters[i].tensor;
      if (!is_in_place(group, i) && lies_in_buffers(group, tensor)) tensor.set_data(tensor.detach().clone());
    });
    for (const auto& group : unit->groups) {  // share_memory gives the storage of a whole group other memory
      if (unit_of(*group->storage) != unit) group->attach(group->full);
    }
  }
}

void store_parameters(Unit& unit, Collectives& control) {
  const Unrecorded unrecorded;
  for (auto& group : unit.groups) {
    std::vector<at::Tensor> values;
    for (std::size_t i = 0; i < group->parameters.size(); ++i) values.push_back(value_to_store(*group, i));
    const at::Tensor flat = flatten(*group, values);
    broadcast(flat, unit.name, control);
    keep_unchanged_masters(*group, flat);
    write_values(*group, flat, {0, group->layout.numel()});
    for (std::size_t i = 0; i < group->parameters.size(); ++i) put_back(*group, i, flat);
  }
}

void load_whole_tensors(const NamedTensors& tensors, Collectives& control, c10::Device device) {
  const Unrecorded unrecorded;
  for (const auto& item : tensors) {
    at::Tensor buffer = item.value();
    if (is_deferred(buffer)) {
      buffer.unsafeGetTensorImpl()->shallow_copy_from(materialize({buffer})[0].getIntrusivePtr());
    }
    const at::Tensor dense = buffer.cpu().contiguous();
    broadcast(dense, item.key(), control);
    if (buffer.device() != device) {
      buffer.set_data(dense.to(device));
    } else if (!buffer.is_non_overlapping_and_dense()) {
      buffer.set_data(dense);  // an expanded buffer's elements share memory, so nothing can be copied into it
    } else if (!dense.is_same(buffer)) {
      buffer.copy_(dense);
    }
  }
}

}  // namespace tessera
