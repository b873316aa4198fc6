#include "engine/memory/training_memory.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <stdexcept>
#include <utility>

#include "engine/device/pinned_memory.h"
#include "engine/memory/device_gradients.h"
#include "engine/memory/device_rules.h"
#include "engine/memory/durable_files.h"
#include "engine/memory/gradient_records.h"
#include "engine/memory/master_weights.h"
#include "engine/memory/state_records.h"
#include "offload/file_tier.h"
#include "offload/host_tier.h"
#include "offload/path_speed.h"
#include "optim/device_kernels.h"
#include "optim/master_assigner.h"
#include "optim/muon_optimizer.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/config/compression_methods.h"
#include "runtime/config/strategy_names.h"
#include "sharding/layout/method_layout.h"
#include "sharding/layout/tier_choice.h"
#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "sharding/whole_tensors.h"
#include "tessera/deferred_init.h"

namespace tessera {
namespace {

/// The placement of a strategy on these ranks.
Placement placement_on(ShardingStrategy kind, const Strategy& strategy, const MeshPosition& mesh, bool shares_memory) {
  const Placement placement = placement_of(kind, strategy.optimizer.shard_over_world);
  return strategy.host_sharing && shares_memory && mesh.shard_size > 1 ? share_parameters(placement) : placement;
}

void place_parameters(FlatGroup& group, const MemoryPlan& plan, Arena& arena) {
  group.make_storage();
  group.parameter_chunks = plan.parameter_chunks_of(group.shape());
  if (plan.parameters_below()) {
    const std::int64_t numel = group.parameter_chunks.before_records();
    if (numel > 0) group.shard = arena.take(numel * group.element_bytes());
    return;
  }
  const Placement& placement = plan.input().placement;
  const bool whole = placement.shared || group.parameter_part.numel == group.layout.numel();
  const bool in_place = placement.keep_gathered || whole;
  const std::int64_t numel = in_place ? group.layout.numel() : group.parameter_part.numel;
  std::byte* memory = arena.take(numel * group.element_bytes());
  group.shard = in_place ? memory + group.parameter_part.offset * group.element_bytes() : memory;
  if (whole) group.full = memory;  // gathered for good
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

void place_training_state(FlatGroup& group, TrainingMemory& memory, const PlanInput& input) {
  const bool is_in_memory = input.offload.gradients == Tier::kMemory || group.unit->index == 0;
  if (!input.updates_in_backward && is_in_memory) {
    group.gradient = reinterpret_cast<float*>(memory.gradients.take(group.gradient_part.numel * 4));
  }
  place_masters(group, input.master, memory.masters);
  const StateFormats& states = group.records.state().states;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const StatePiece piece = state_piece(states[i], group.records.states_in_memory());
    group.state[i].data = memory.optimizer.take(piece.data_bytes);
    if (piece.scale_bytes == 0) continue;
    group.state[i].scales = reinterpret_cast<float*>(memory.optimizer.take(piece.scale_bytes));
  }
}

/// Of whole tensors, which groups have in memory or, the last ones, in records.
void place_tensor_states(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units, Arena& arena) {
  std::int64_t index = 0;
  for_each_trainable(units, [&](FlatGroup& group) {
    const std::int64_t numel = group.tensor_state_part.numel;
    if (numel == 0) return;
    if (index < plan.tensor_states_in_memory()) {
      group.tensor_state = reinterpret_cast<float*>(arena.take(numel * 4));
    } else {
      group.tensor_state_record = index - plan.tensor_states_in_memory();
    }
    ++index;
  });
}

/// What people call a piece of a group: the first parameter that it has a part of.
std::string name_of_piece(const FlatGroup& group, Extent piece) {
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    if (intersect(group.layout.extent(i), piece).numel > 0) return "parameter " + group.parameters[i].name;
  }
  return "padding of unit " + group.unit->name;
}

/// Records on their way into files.
struct NewRecords {
  std::vector<std::size_t> sizes;
  std::vector<std::string> names;

  /// Numbers the records of a part, behind those that are there. `bytes_of(chunk)`. Returns the first one's number.
  template <class BytesOf>
  std::int64_t add(const FlatGroup& group, Extent part, const Chunks& chunks, const BytesOf& bytes_of) {
    const auto first = static_cast<std::int64_t>(names.size());
    for (std::int64_t chunk = chunks.first_record(); chunk < chunks.chunks(); ++chunk) {
      const Extent place = chunks.chunk(chunk);
      sizes.push_back(static_cast<std::size_t>(bytes_of(chunk)));
      names.push_back(name_of_piece(group, {part.offset + place.offset, place.numel}));
    }
    return first;
  }
};

/// With so little on disk, measuring would take longer than it saves.
constexpr std::int64_t kLeastMeasuredBytes = std::int64_t{256} << 20;

/// The directories, with their disks' shares of the records: by measured bandwidth, and equal where there is little on disk.
std::vector<StripePath> measured_paths(const MemoryPlan& plan, const std::vector<std::string>& directories, int rank) {
  std::vector<StripePath> paths;
  for (const std::string& directory : directories) paths.push_back({directory});
  if (paths.size() < 2 || plan.disk().bytes < kLeastMeasuredBytes) return paths;
  PathSpeedOptions options;
  options.who = "rank " + std::to_string(rank);
  const std::vector<double> weights = value_or_throw(path_weights(directories, options));
  std::string text;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    paths[i].weight = weights[i];
    text += c10::str(i > 0 ? ", " : "", paths[i].directory, " ", weights[i]);
  }
  if (rank == 0) log_info("offload.paths get records in proportion to their disks' bandwidth: " + text);
  return paths;
}

/// The same; but where a commit says where records are, with the shares that they had then.
std::vector<StripePath> stripe_paths(const MemoryPlan& plan, const std::vector<std::string>& directories, int rank,
                                     DurableFiles* durable) {
  const std::optional<std::vector<double>> then = durable ? durable->weights() : std::nullopt;
  std::vector<StripePath> paths;
  if (then && then->size() == directories.size()) {
    for (std::size_t i = 0; i < directories.size(); ++i) paths.push_back({directories[i], (*then)[i]});
  } else {
    paths = measured_paths(plan, directories, rank);
  }
  std::vector<double> weights;
  for (const StripePath& path : paths) weights.push_back(path.weight);
  if (durable) durable->use_weights(weights);
  return paths;
}

/// What the files that hold `pool` have in common.
FileTierOptions tier_options(NewRecords records, const RecordPool& pool, const OffloadConfig& offload,
                             const std::vector<StripePath>& paths, int rank) {
  FileTierOptions options;
  options.who = "rank " + std::to_string(rank);
  options.sizes = std::move(records.sizes);
  options.record_name = [names = std::move(records.names)](std::int64_t record) { return names[record]; };
  options.paths = paths;
  options.records = pool.records;
  options.record_bytes = static_cast<std::size_t>(pool.record_bytes);
  options.resident_bytes = static_cast<std::size_t>(pool.cached * pool.record_bytes);
  options.resident_first = pool.cached_first;
  options.verify = offload.verify;
  options.io.any_thread = true;  // a program may make an Engine on one thread and train on another
  return options;
}

std::shared_ptr<StateRecords> logged(std::shared_ptr<StateRecords> records, int rank) {
  log_info("rank " + std::to_string(rank) + ": " + records->describe());
  return records;
}

/// Makes the files that hold `pool`, and what reads and writes them. `kind`: of records, as DurableFiles calls them. `give`: memory
/// that a GPU copies from and to. `ahead`: so many are read ahead, and as many written behind.
std::shared_ptr<StateRecords> make_tier(NewRecords records, const RecordPool& pool, const MemoryPlan& plan,
                                        const std::vector<StripePath>& paths, int rank, const DurableFiles* durable,
                                        const std::string& kind, const AlignedMemory::Give& give, std::int64_t ahead) {
  FileTierOptions options = tier_options(std::move(records), pool, plan.input().offload, paths, rank);
  options.read_ahead = options.write_behind = static_cast<int>(ahead);
  options.most_held = static_cast<int>(pool.held);
  options.memory = give;
  if (durable) options.durable = durable->name_of(kind);
  options.durable_is_there = durable && durable->last();
  std::unique_ptr<FileTier> files = value_or_throw(FileTier::create(options));
  DurableTier* const durable_files = durable ? files.get() : nullptr;
  auto tier = std::make_shared<StateRecords>(std::move(files), durable_files);
  if (durable) durable->protect(*tier, kind);
  return logged(std::move(tier), rank);
}

/// Makes the pinned memory that holds `pool`.
std::unique_ptr<RecordTier> host_tier(NewRecords records, const RecordPool& pool, int rank,
                                      const AlignedMemory::Give& give) {
  HostTierOptions options;
  options.records = pool.records;
  options.record_bytes = static_cast<std::size_t>(pool.record_bytes);
  options.sizes = std::move(records.sizes);
  options.who = "rank " + std::to_string(rank);
  options.give = give;
  return value_or_throw(HostTier::create(options));
}

// What needs less pinned memory.
constexpr const char kLessBelow[] =
    "a smaller \"fraction\" in \"offload\", or the tier \"nvme\", needs less of it; where the tier is auto, a higher "
    "memory.limit, or \"paths\" on disks";
constexpr const char kLessGradients[] =
    "offload.gradients on the tier \"nvme\" needs less of it, and in \"memory\" none";
constexpr const char kLessCopies[] =
    "offload.step \"gpu\" needs none of it, and parameters and gradients on the tier \"host\" need less";

/// Where `pool` says. `kernels`: of the GPU that trains, or null.
std::shared_ptr<StateRecords> make_records(NewRecords records, const RecordPool& pool, const MemoryPlan& plan,
                                           const std::vector<StripePath>& paths, int rank, DeviceKernels* kernels,
                                           const DurableFiles* durable, const std::string& kind, std::int64_t ahead) {
  const AlignedMemory::Give give = kernels ? pinned_memory_of(*kernels, rank, kind, kLessBelow) : nullptr;
  if (pool.pinned_bytes > 0) {
    return logged(std::make_shared<StateRecords>(host_tier(std::move(records), pool, rank, give)), rank);
  }
  return make_tier(std::move(records), pool, plan, paths, rank, durable, kind, give, ahead);
}

std::shared_ptr<StateRecords> make_state_records(const MemoryPlan& plan,
                                                 const std::vector<std::unique_ptr<Unit>>& units,
                                                 const std::vector<StripePath>& paths, int rank, DeviceKernels* kernels,
                                                 const DurableFiles* durable) {
  const RecordPool& pool = plan.state_records();
  if (pool.records == 0) return nullptr;
  NewRecords added;
  for_each_trainable(units, [&](FlatGroup& group) {
    group.first_record = added.add(group, group.optimizer_part, group.records,
                                   [&](std::int64_t chunk) { return group.records.record(chunk).bytes; });
  });
  auto records =
      make_records(std::move(added), pool, plan, paths, rank, kernels, durable, "states", plan.queue_depth());
  for_each_trainable(units, [&](FlatGroup& group) {
    if (group.records.records() > 0) group.below = records;
  });
  return records;
}

/// As place_tensor_states numbered them.
std::shared_ptr<StateRecords> make_tensor_state_records(const MemoryPlan& plan,
                                                        const std::vector<std::unique_ptr<Unit>>& units,
                                                        const std::vector<StripePath>& paths, int rank,
                                                        DeviceKernels* kernels, const DurableFiles* durable) {
  const RecordPool& pool = plan.tensor_state_records();
  if (pool.records == 0) return nullptr;
  NewRecords added;
  std::vector<FlatGroup*> groups;
  for_each_trainable(units, [&](FlatGroup& group) {
    if (group.tensor_state_record < 0) return;
    groups.push_back(&group);
    added.sizes.push_back(static_cast<std::size_t>(MemoryPlan::tensor_state_record_bytes(group.tensor_state_part)));
    added.names.push_back("states of matrices of unit " + group.unit->name);
  });
  auto records = make_records(std::move(added), pool, plan, paths, rank, kernels, durable, "tensor_states",
                              plan.tensor_states_ahead());
  for (FlatGroup* group : groups) group->tensor_states_below = records;
  return records;
}

/// In the order of MemoryPlan::parameter_records.
std::shared_ptr<StateRecords> make_parameter_records(const MemoryPlan& plan,
                                                     const std::vector<std::unique_ptr<Unit>>& units,
                                                     const std::vector<StripePath>& paths, int rank,
                                                     DeviceKernels* kernels, const DurableFiles* durable) {
  const RecordPool& pool = plan.parameter_records();
  if (pool.records == 0) return nullptr;
  NewRecords added;
  std::vector<FlatGroup*> groups;
  for (const bool trains : {true, false}) {
    for (const auto& unit : units) {
      for (const auto& group : unit->groups) {
        if (group->trainable == trains) groups.push_back(group.get());
      }
    }
  }
  for (FlatGroup* group : groups) {
    const Chunks& chunks = group->parameter_chunks;
    group->first_parameter_record = added.add(*group, group->parameter_part, chunks, [&](std::int64_t chunk) {
      return chunks.chunk(chunk).numel * group->element_bytes();
    });
  }
  auto records =
      make_records(std::move(added), pool, plan, paths, rank, kernels, durable, "parameters", plan.queue_depth());
  for (FlatGroup* group : groups) {
    if (group->parameter_chunks.records() > 0) group->parameters_below = records;
  }
  return records;
}

/// Scratch on every path: no commit needs gradients.
void make_gradient_records(TrainingMemory& memory, const MemoryPlan& plan,
                           const std::vector<std::unique_ptr<Unit>>& units, const MeshAxes& axes,
                           const std::vector<StripePath>& paths, DeviceKernels* kernels) {
  const RecordPool& pool = plan.gradient_records();
  if (pool.records == 0) return;
  const int rank = axes.world->rank();
  NewRecords added;
  for (const auto& unit : units) {
    const UnitShape shape = unit->shape();
    if (unit->index == 0 || shape.trainable_numel() == 0) continue;
    added.sizes.push_back(static_cast<std::size_t>(plan.gradient_record_bytes_of(shape)));
    added.names.push_back("gradients of unit " + unit->name);
  }
  const auto tell = [&](const std::string& where) {
    log_info("rank " + std::to_string(rank) + ": gradients: " + where);
  };
  const AlignedMemory::Give give = kernels ? pinned_memory_of(*kernels, rank, "gradients", kLessGradients) : nullptr;
  const auto in_slots = [&](std::unique_ptr<RecordTier> tier, FileTier* files) {
    memory.gradient_slots = Arena::shared("gradients on the device", pool.device_bytes(), *axes.reduce);
    std::byte* const slots = memory.gradient_slots.take(pool.device_bytes());
    memory.device_gradients =
        std::make_shared<DeviceGradients>(std::move(tier), files, pool.held, units, *kernels,
                                          DeviceGradients::Slots{slots, pool.record_bytes, pool.device_slots});
    tell(memory.device_gradients->describe());
  };
  if (pool.pinned_bytes > 0) return in_slots(host_tier(std::move(added), pool, rank, give), nullptr);
  FileTierOptions options = tier_options(std::move(added), pool, plan.input().offload, paths, rank);
  options.read_ahead = options.write_behind = static_cast<int>(MemoryPlan::kGradientsAhead);
  options.most_held = static_cast<int>(kernels ? pool.held : plan.units_under_way());
  options.memory = give;
  std::unique_ptr<FileTier> files = value_or_throw(FileTier::create(options));
  if (kernels) {
    FileTier* const same = files.get();
    return in_slots(std::move(files), same);
  }
  memory.gradient_records = std::make_shared<GradientRecords>(std::move(files), units);
  tell(memory.gradient_records->describe());
}

/// All of a group's values in one flat tensor: fp32 where they can train, so that masters lose nothing.
at::Tensor flatten(const FlatGroup& group, const std::vector<at::Tensor>& values) {
  const DType dtype = is_trainable(group.dtype) ? DType::kF32 : group.dtype;
  const at::Tensor flat = at::zeros({group.layout.numel()}, at::TensorOptions(scalar_type_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const FlatParameter& parameter = group.parameters[i];
    flat.as_strided(parameter.sizes, parameter.strides, group.layout.extent(i).offset).copy_(values[i]);
  }
  return flat;
}

/// torch::load gives a tensor the file's bytes and leaves its dtype, so a file of fp32 is read as noise of bf16. A storage
/// that holds just this many elements of a wider type says so.
void expect_no_wider_bytes(const FlatParameter& parameter, const at::Tensor& value) {
  const std::size_t narrow = value.nbytes(), bytes = value.storage().nbytes();
  if (narrow == 0 || value.storage_offset() != 0 || (bytes != 2 * narrow && bytes != 4 * narrow)) return;
  throw Error(
      ExitCode::kUsage,
      c10::str("parameter ", parameter.name, " is ", value.scalar_type(), ", but was given memory of ", bytes / narrow,
               " times its size under Gathered(kWrite), as torch::load does with a file of a wider "
               "dtype. hint: load into a module of the file's dtype, and copy_ its parameters"));
}

bool is_on_own_storage(const FlatGroup& group, const at::Tensor& value) {
  return value.has_storage() && value.storage().unsafeGetStorageImpl() == group.storage.get();
}

/// What a program left in a parameter under Gathered(kWrite), wherever that is now.
at::Tensor value_to_store(const FlatGroup& group, std::size_t i) {
  const FlatParameter& parameter = group.parameters[i];
  const at::Tensor value = parameter.tensor.detach();
  if (is_in_place(group, i) || is_on_own_storage(group, value)) return value;
  expect_no_wider_bytes(parameter, value);
  if (value.sizes() == at::IntArrayRef(parameter.sizes)) return value;
  throw Error(ExitCode::kUsage, c10::str("parameter ", parameter.name, " has sizes ", at::IntArrayRef(parameter.sizes),
                                         ", but was given a value of sizes ", value.sizes(),
                                         " under Gathered(kWrite). hint: is the file of another model?"));
}

/// A parameter that was given other memory becomes a view of its buffer again, with the value that it was given.
void put_back(FlatGroup& group, std::size_t i) {
  if (is_in_place(group, i)) return;
  FlatParameter& parameter = group.parameters[i];
  at::Tensor value = parameter.tensor.detach();
  if (is_on_own_storage(group, value)) {  // but with other memory, as share_memory gives it to the whole group
    value = value.clone();
    group.attach(group.full);
  }
  rebase(parameter, group, group.layout.extent(i).offset);
  parameter.tensor.detach().copy_(value);
}

void broadcast(const at::Tensor& tensor, const std::string& label, Collectives& control) {
  throw_if_error(control.broadcast(label, tensor.data_ptr(), tensor.nbytes(), 0).wait());
}

}  // namespace

TrainingMemory TrainingMemory::allocate(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                                        const MeshAxes& axes, c10::Device device,
                                        const std::vector<std::string>& directories, DeviceKernels* kernels,
                                        DurableFiles* durable) {
  const MemoryUse& use = plan.use();
  const PlanInput& input = plan.input();
  TrainingMemory memory;
  const bool below = plan.parameters_below();
  const int sharers = input.placement.shared ? input.mesh.shard_size : 1;
  memory.owners_of_parameters = below ? 1 : sharers;
  memory.owners_of_slots = below ? sharers : 1;
  const std::int64_t parameters = use[MemoryCategory::kParameters], slots = use[MemoryCategory::kSlots];
  memory.parameters = memory.owners_of_parameters > 1 ? Arena::common("parameters", parameters * sharers, *axes.gather)
                                                      : Arena::shared("parameters", parameters, *axes.gather);
  // The transport of a GPU fills slots by itself, and is fastest in memory that it has registered. Parts that are brought
  // to slots are sent from there.
  const bool is_sent_from = below || axes.gather->gpu() != Collectives::kHostMemory;
  memory.slots = memory.owners_of_slots > 1 ? Arena::common("slots", slots * sharers, *axes.gather)
                 : is_sent_from             ? Arena::shared("slots", slots, *axes.gather)
                                            : Arena::plain("slots", slots, device);
  memory.gradients = Arena::shared("gradients", use[MemoryCategory::kGradients], *axes.reduce);
  memory.buckets = Arena::shared("buckets", use[MemoryCategory::kBuckets], *axes.reduce);
  memory.masters = Arena::plain("masters", use[MemoryCategory::kMasters], device);
  // OuterSteps has its own.
  const MemoryPlan::OuterNumel& outer = plan.outer_numel();
  const std::int64_t outer_states = input.outer.has_outer_optimizer() ? 2 * 4 * outer.part : 0;
  const std::int64_t scratch =
      use[MemoryCategory::kStaging] - plan.matrix_bytes() - plan.weight_copy_bytes() - 4 * outer.staging();
  memory.optimizer = Arena::plain("optimizer", use[MemoryCategory::kOptimizer] - outer_states, device);
  memory.scratch = Arena::plain("scratch", scratch, device);
  memory.matrices = Arena::plain("matrices", plan.matrix_bytes(), device);
  memory.weight_copy = Arena::plain("a copy of weights", plan.weight_copy_bytes(), device);
  memory.feedback = Arena::plain("feedback", use[MemoryCategory::kFeedback]);
  memory.record_slots = Arena::plain("records on the device", plan.state_records().device_bytes(), device);
  memory.tensor_state_slots =
      Arena::plain("states of matrices on the device", plan.tensor_state_records().device_bytes(), device);
  memory.checkpoint = Arena::plain("checkpoint", use[MemoryCategory::kCheckpoint]);
  // Now, and not while training waits for the copy, the kernel finds its pages.
  std::fill_n(memory.checkpoint.data(), memory.checkpoint.bytes(), std::byte{1});
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      const std::int64_t numel = group->layout.numel();
      group->device = device;
      group->parameter_part = owned(input.placement.parameters, input.mesh, numel);
      group->gradient_part = owned(input.placement.gradients, input.mesh, numel);
      group->optimizer_part = owned(input.placement.optimizer, input.mesh, numel);
      place_parameters(*group, plan, memory.parameters);
      if (!group->trainable) continue;
      group->records = plan.records_of(group->shape());
      group->tensor_state_part = plan.tensor_state_part_of(group->shape());
      place_training_state(*group, memory, input);
    }
  }
  place_tensor_states(plan, units, memory.optimizer);
  const int rank = axes.world->rank();
  const std::vector<StripePath> paths = stripe_paths(plan, directories, rank, durable);
  memory.parameter_records = make_parameter_records(plan, units, paths, rank, kernels, durable);
  memory.state_records = make_state_records(plan, units, paths, rank, kernels, durable);
  memory.tensor_state_records = make_tensor_state_records(plan, units, paths, rank, kernels, durable);
  memory.records_are_pinned = kernels != nullptr;
  memory.host_copies_bytes = plan.host_copies_bytes();
  if (plan.steps_on_host()) {
    memory.host_copies = pinned_memory_of(*kernels, rank, "copies of gradients and parameters",
                                          kLessCopies)(static_cast<std::size_t>(memory.host_copies_bytes));
  }
  make_gradient_records(memory, plan, units, axes, paths, kernels);
  if (durable) durable->take_memory(memory, plan, units, device, kernels);
  for (const Arena* arena : {&memory.parameters, &memory.masters, &memory.optimizer}) arena->expect_full();
  if (!input.updates_in_backward) memory.gradients.expect_full();
  return memory;
}

MemoryUse TrainingMemory::allocated() const {
  MemoryUse use;
  use[MemoryCategory::kParameters] = parameters.taken() / owners_of_parameters;
  use[MemoryCategory::kSlots] = slots.bytes() / owners_of_slots;
  use[MemoryCategory::kGradients] = gradients.bytes();
  use[MemoryCategory::kBuckets] = buckets.bytes();
  use[MemoryCategory::kMasters] = masters.taken();
  use[MemoryCategory::kOptimizer] = optimizer.taken();
  use[MemoryCategory::kStaging] = scratch.bytes() + matrices.bytes() + weight_copy.bytes();
  use[MemoryCategory::kCheckpoint] = checkpoint.bytes();
  use[MemoryCategory::kFeedback] = feedback.bytes();
  use[MemoryCategory::kRecords] = record_slots.bytes() + tensor_state_slots.bytes();
  for (const auto& records : {parameter_records, state_records, tensor_state_records}) {
    if (!records) continue;
    use[records_are_pinned ? MemoryCategory::kHostRecords : MemoryCategory::kRecords] += records->memory_bytes();
  }
  use[MemoryCategory::kHostRecords] += host_copies_bytes;
  if (gradient_records) use[MemoryCategory::kRecords] += gradient_records->memory_bytes();
  use[MemoryCategory::kRecords] += gradient_slots.bytes();
  if (device_gradients) use[MemoryCategory::kHostRecords] += device_gradients->memory_bytes();
  return use;
}

GradientStore* TrainingMemory::gradient_store() const {
  if (device_gradients) return device_gradients.get();
  return gradient_records.get();
}

namespace {

/// The CPU updates what lies in the host's memory, and nothing else.
void expect_step_on_host(const MemoryPlan& plan) {
  if (plan.can_step_on_host()) return;
  if (plan.passes_twice()) {
    throw Error(
        ExitCode::kConfig,
        "/offload/step: \"cpu\" updates each element once its gradient is there, and this optimizer.type goes over "
        "masters and moments twice, or over whole matrices first. hint: take \"gpu\"");
  }
  if (plan.has_whole_records()) {
    throw Error(ExitCode::kConfig,
                "/offload/step: \"cpu\" updates a GPU's parameters where they lie, in its memory or its host's, and "
                "here they lie in files. hint: give parameters the tier \"host\", or take \"gpu\"");
  }
  throw Error(
      ExitCode::kConfig,
      "/offload/step: \"cpu\" updates elements whose masters and moments both lie in the host's memory, and here "
      "some have one of them there and the other on the GPU. hint: give masters and moments the tier \"host\" and "
      "one fraction, or take \"gpu\"");
}

/// A GradientMethod makes the sums.
bool has_method(const CompressionConfig& compression) {
  return method_kind(compression) != MethodKind::kNone || compression.hook;
}

/// PlanInput::prefetch.
std::int64_t units_ahead(const Strategy& strategy, std::span<const UnitShape> units) {
  if (strategy.prefetch_bytes == 0) return strategy.prefetch;
  std::int64_t largest = 1;
  for (const UnitShape& unit : units.subspan(1)) largest = std::max(largest, unit.gathered_bytes());
  return std::clamp<std::int64_t>(strategy.prefetch_bytes / largest, 1,
                                  std::max<std::int64_t>(std::ssize(units) - 1, 1));
}

}  // namespace

bool compresses(const CompressionConfig& compression) {
  return compression.gradients != WireForm::kPlain || compression.sums != WireForm::kPlain || has_method(compression);
}

MemoryPlan make_plan(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const PlanScene& scene,
                     const Optimizer& optimizer) {
  expect_built_for_device(strategy, scene.is_queued);
  if (has_method(strategy.compression) && scene.mesh.replicate_size > 1) {
    throw Error(ExitCode::kConfig, c10::str("/compression: ", kCompressionMethods,
                                            " need a mesh of one replica, whose ranks sum all "
                                            "gradients at once, got ",
                                            scene.mesh.replicate_size, ". hint: leave \"mesh\" out"));
  }
  const OptimizerType type = strategy.optimizer.type;
  PlanInput input;
  for (const auto& unit : units) input.units.push_back(unit->shape());
  input.placement = placement_on(strategy.strategy, strategy, scene.mesh, scene.shares_memory);
  input.mesh = scene.mesh;
  input.outer = scene.sync;
  if (scene.sync.makes_outer_steps()) input.replicas = scene.replicas;
  input.is_queued = scene.is_queued;
  input.reduces_in_background = scene.reduces_in_background;
  input.reductions_ahead = strategy.reductions_ahead;
  input.prefetch = units_ahead(strategy, input.units);
  input.reduce = strategy.mixed_precision.reduce;
  input.accumulation = strategy.gradient_accumulation;
  input.sync = strategy.gradient_sync;
  input.master = strategy.mixed_precision.master;
  input.states = optimizer.state_formats();
  if (type == OptimizerType::kMuon) {
    input.matrix_states = MuonOptimizer(strategy.optimizer, strategy.ema).state_formats();
  } else {
    input.matrix_states = MasterAssigner(strategy.optimizer, strategy.ema).state_formats();
  }
  input.matrix_work = {.is_muon = type == OptimizerType::kMuon, .multiplies = type != OptimizerType::kAdafactor};
  input.updates_twice = adapts_layers(type);
  input.first_pass_moves_states = type == OptimizerType::kLamb;
  input.offload = strategy.offload;
  input.offload.paths.clear();
  if (scene.offloaded_step) input.offload.step = *scene.offloaded_step;
  // A program's rule is called where the model is, unless the strategy says something else.
  const bool stays_on_gpu = scene.is_queued && type == OptimizerType::kOwn;
  if (stays_on_gpu && input.offload.step == OffloadedStep::kAuto) input.offload.step = OffloadedStep::kGpu;
  input.updates_in_backward = strategy.optimizer.in_backward;
  if (strategy.memory.limit_bytes > 0 && !input.offload.queue_depth) input.offload.queue_depth = kQueueDepth;
  input.copies_checkpoints = strategy.checkpoint.async;
  input.is_durable = strategy.durable.every > 0;
  input.compression = strategy.compression;
  const WireForm gathers = strategy.compression.gathers;
  if (scene.shard_compressed_part > 0) input.gathers = gathers;
  if (scene.replicate_compressed_part > 0 && input.placement.optimizer.replicate && !is_lossy(gathers))
    input.replica_gathers = gathers;
  if (compresses(strategy.compression)) {
    const CompressedAxes axes = strategy.compression.axes;
    if (axes != CompressedAxes::kReplicate) input.compressed_shard_part = scene.shard_compressed_part;
    if (axes != CompressedAxes::kShard) input.compressed_replicate_part = scene.replicate_compressed_part;
  }
  input.filling_buckets = strategy.units.bucket_cap_mb ? 2 : 1;
  const std::int64_t limit = strategy.memory.limit_bytes;
  const Tier below = tier_below(strategy.offload, scene.is_queued);
  MemoryPlan plan(with_tiers_chosen(input, limit, below));
  const bool has_states_of_tensors = plan.tensor_state_records().pinned_bytes > 0;
  if (plan.steps_on_host() || (plan.input().offload.step == OffloadedStep::kCpu && has_states_of_tensors))
    expect_step_on_host(plan);
  const bool is_open = plan.input().offload.step == OffloadedStep::kAuto && plan.state_records().pinned_bytes > 0;
  if (!is_open || limit <= 0 || plan.use().limited() <= limit || !plan.can_step_on_host()) return plan;
  input.offload.step = OffloadedStep::kCpu;  // which needs less memory of the GPU
  MemoryPlan smaller(with_tiers_chosen(std::move(input), limit, below));
  return smaller.use().limited() <= limit ? smaller : plan;
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
    for (std::size_t i = 0; i < group->parameters.size(); ++i) put_back(*group, i);
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
      buffer.set_data(dense);  // of an expanded one, elements share memory, which nothing can be copied into
    } else if (!dense.is_same(buffer)) {
      buffer.copy_(dense);
    }
  }
}

std::string next_cheaper(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory, std::int64_t limit) {
  constexpr ShardingStrategy kFromDearToCheap[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                                   ShardingStrategy::kShardGradients, ShardingStrategy::kFullShard};
  for (ShardingStrategy cheaper : kFromDearToCheap) {
    PlanInput input = plan.input();
    input.placement = placement_on(cheaper, strategy, input.mesh, shares_memory);
    const std::int64_t total = MemoryPlan(std::move(input)).use().limited();
    if (total > limit) continue;
    return name_of(cheaper) + " with " + format_bytes(total);
  }
  return "";
}

namespace {

/// What a unit needs at once while it is computed: its gathered values and its bucket.
std::int64_t peak_of(const UnitShape& unit, const MemoryPlan& plan) {
  return unit.gathered_bytes() + plan.bucket_bytes_of(unit);
}

}  // namespace

void check_memory_limit(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory) {
  const std::int64_t limit = strategy.memory.limit_bytes;
  if (limit <= 0 || plan.use().limited() <= limit) return;
  const std::string cheaper = next_cheaper(plan, strategy, shares_memory, limit);
  const std::string advice = cheaper.empty() ? "no strategy fits; more ranks, a smaller model or bf16 parameters would"
                                             : "the next cheaper strategy that fits is " + cheaper;
  throw Error(ExitCode::kConfig, "/memory/limit: the plan for " + name_of(strategy.strategy) + " needs " +
                                     format_bytes(plan.use().limited()) + " a rank, the limit is " +
                                     format_bytes(limit) + ".\n" + plan.to_table() + "hint: " + advice);
}

std::string explain_out_of_memory(const std::string& what, const MemoryPlan& plan, const Strategy& strategy,
                                  bool shares_memory, std::optional<std::int64_t> activation_bytes) {
  const std::vector<UnitShape>& units = plan.input().units;
  const auto largest = std::max_element(units.begin(), units.end(), [&](const UnitShape& a, const UnitShape& b) {
    return peak_of(a, plan) < peak_of(b, plan);
  });
  std::string text = what + "\nthe plan of " + name_of(strategy.strategy) +
                     ", beside which activations have to fit:\n" + plan.to_table();
  if (largest != units.end()) {
    text += "the largest unit is " + largest->name + ": " + format_bytes(largest->gathered_bytes()) + " gathered, " +
            format_bytes(plan.bucket_bytes_of(*largest)) + " of gradients\n";
  }
  if (activation_bytes) text += "activations of the first step: " + format_bytes(*activation_bytes) + "\n";
  const std::string cheaper = next_cheaper(plan, strategy, shares_memory, plan.use().limited() - 1);
  return text + "hint: fewer samples a microbatch, or recomputation, make activations smaller; " +
         (cheaper.empty() ? "no strategy needs less than this one" : "the next cheaper strategy is " + cheaper);
}

}  // namespace tessera
