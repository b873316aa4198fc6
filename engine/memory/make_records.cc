#include "engine/memory/make_records.h"

#include <utility>

#include "engine/device/pinned_memory.h"
#include "engine/memory/durable_files.h"
#include "engine/memory/records/device_gradients.h"
#include "engine/memory/records/gradient_records.h"
#include "engine/memory/records/mapped_carrier.h"
#include "engine/memory/records/slot_carrier.h"
#include "engine/memory/records/tier_carrier.h"
#include "offload/file_tier.h"
#include "offload/host_tier.h"
#include "offload/io/path_speed.h"
#include "optim/device_kernels.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

// This file works as follows. There is one function for each kind of state: parameters, masters and states, tensor
// states, gradients. Such a function numbers the records of all groups (NewRecords). It makes the tier that holds them:
// files, or pinned memory of a GPU's host (`make_state_tier`, except for gradients). Then it gives groups their
// records. All kinds use the same directories, which get records in proportion to the bandwidth of their disks
// (`stripe_paths`).

/// Returns the name of a piece of a group for messages: the name of the first parameter of which the piece holds a
/// part.
std::string name_of_piece(const FlatGroup& group, Extent piece) {
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    if (intersect(group.layout.extent(i), piece).numel > 0) return "parameter " + group.parameters[i].name;
  }
  return "padding of unit " + group.unit->name;
}

/// The sizes and names of records that are to be made, in files or in memory of a GPU's host.
struct NewRecords {
  const RecordPool& pool;
  std::vector<std::size_t> sizes = {};
  std::vector<std::string> names = {};

  /// Appends the records of a part. `bytes_of(chunk)` returns the size of each record. Returns the number of the first
  /// record.
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

/// Disks are measured only if a rank has at least this many bytes on disk. If there are fewer bytes, measuring takes
/// more time than it saves.
constexpr std::int64_t kLeastMeasuredBytes = std::int64_t{256} << 20;

/// Returns the directories with their disks' shares of the records: in proportion to the measured bandwidth, or equal
/// if little is on disk.
std::vector<StripePath> measured_paths(const MemoryPlan& plan, const std::vector<std::string>& directories, int rank) {
  std::vector<StripePath> paths;
  for (const std::string& directory : directories) paths.push_back({directory});
  if (paths.size() < 2 || plan.records().disk.bytes < kLeastMeasuredBytes) return paths;
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

/// Returns the directories with their shares as measured_paths does. If there is a last commit, its shares are
/// returned, since the records lie where that commit says.
std::vector<StripePath> stripe_paths(const RecordSources& from) {
  DurableFiles* const durable = from.durable;
  const std::optional<std::vector<double>> then = durable ? durable->weights() : std::nullopt;
  std::vector<StripePath> paths;
  if (then && then->size() == from.directories.size()) {
    for (std::size_t i = 0; i < then->size(); ++i) paths.push_back({from.directories[i], (*then)[i]});
  } else {
    paths = measured_paths(from.plan, from.directories, from.rank());
  }
  std::vector<double> weights;
  for (const StripePath& path : paths) weights.push_back(path.weight);
  if (durable) durable->use_weights(weights);
  return paths;
}

/// Returns the options that all files of records have in common.
FileTierOptions tier_options(const RecordSources& from, const std::vector<StripePath>& paths, NewRecords records) {
  const RecordPool& pool = records.pool;
  FileTierOptions options;
  options.who = "rank " + std::to_string(from.rank());
  options.sizes = std::move(records.sizes);
  options.record_name = [names = std::move(records.names)](std::int64_t record) { return names[record]; };
  options.paths = paths;
  options.records = pool.records;
  options.record_bytes = static_cast<std::size_t>(pool.record_bytes);
  options.resident_bytes = static_cast<std::size_t>(pool.cached * pool.record_bytes);
  options.resident_first = pool.cached_first;
  options.verify = from.plan.tiers().verify;
  options.io.any_thread = true;  // a program may make an Engine on one thread and train on another
  return options;
}

std::shared_ptr<TierCarrier> logged(std::shared_ptr<TierCarrier> records, int rank) {
  log_info("rank " + std::to_string(rank) + ": " + records->describe());
  return records;
}

/// Makes the files that hold `records`, and the tier that reads and writes them. `kind`: the name by which DurableFiles
/// knows this kind of records. `give`: allocates memory that a GPU can copy from and to; null if no GPU trains.
/// `ahead`: the number of records that are read ahead, and also of records that are written in the background.
std::shared_ptr<TierCarrier> make_tier(const RecordSources& from, const std::vector<StripePath>& paths,
                                       NewRecords records, const std::string& kind, const AlignedMemory::Give& give,
                                       std::int64_t ahead) {
  const DurableFiles* const durable = from.durable;
  const std::int64_t held = records.pool.held;
  FileTierOptions options = tier_options(from, paths, std::move(records));
  options.read_ahead = options.write_behind = static_cast<int>(ahead);
  options.most_held = static_cast<int>(held);
  options.memory = give;
  if (durable) options.durable = durable->name_of(kind);
  options.durable_is_there = durable && durable->last();
  std::unique_ptr<FileTier> files = value_or_throw(FileTier::create(options));
  DurableTier* const durable_files = durable ? files.get() : nullptr;
  auto tier = std::make_shared<TierCarrier>(std::move(files), durable_files);
  if (durable) durable->protect(*tier, kind);
  return logged(std::move(tier), from.rank());
}

/// Makes the pinned memory that holds `records`.
std::unique_ptr<RecordTier> host_tier(NewRecords records, int rank, const AlignedMemory::Give& give) {
  HostTierOptions options;
  options.records = records.pool.records;
  options.record_bytes = static_cast<std::size_t>(records.pool.record_bytes);
  options.sizes = std::move(records.sizes);
  options.who = "rank " + std::to_string(rank);
  options.give = give;
  return value_or_throw(HostTier::create(options));
}

// These are the hints of errors about too little pinned memory.
constexpr const char kLessBelow[] =
    "[T0234] hint: a smaller \"fraction\" in \"offload\", or the tier \"nvme\", needs less of it; where the tier is "
    "auto, a higher memory.limit, or \"paths\" on disks";
constexpr const char kLessGradients[] =
    "[T0235] hint: offload.gradients on the tier \"nvme\" needs less of it, and in \"memory\" none";
constexpr const char kLessCopies[] =
    "[T0236] hint: offload.step \"gpu\" needs none of it, and parameters and gradients on the tier \"host\" need less";

/// Makes the tier of `records` in pinned memory or in files, as their pool says.
std::shared_ptr<TierCarrier> make_state_tier(const RecordSources& from, const std::vector<StripePath>& paths,
                                             NewRecords records, const std::string& kind, std::int64_t ahead) {
  const int rank = from.rank();
  const AlignedMemory::Give give = from.kernels ? pinned_memory_of(*from.kernels, rank, kind, kLessBelow) : nullptr;
  if (records.pool.pinned_bytes > 0)
    return logged(std::make_shared<TierCarrier>(host_tier(std::move(records), rank, give)), rank);
  return make_tier(from, paths, std::move(records), kind, give, ahead);
}

std::shared_ptr<TierCarrier> make_state_records(const RecordSources& from, const std::vector<StripePath>& paths) {
  NewRecords added{from.plan.records().states};
  if (added.pool.records == 0) return nullptr;
  for_each_trainable(from.units, [&](FlatGroup& group) {
    group.states_below.first_record = added.add(group, group.optimizer_part, group.records,
                                                [&](std::int64_t chunk) { return group.records.record(chunk).bytes; });
  });
  auto records = make_state_tier(from, paths, std::move(added), "states", from.plan.records().queue_depth);
  for_each_trainable(from.units, [&](FlatGroup& group) {
    if (group.records.records() > 0) group.states_below.carrier = records;
  });
  return records;
}

/// Makes the records of tensor states, in the order in which place_tensor_states numbered them.
std::shared_ptr<TierCarrier> make_tensor_state_records(const RecordSources& from,
                                                       const std::vector<StripePath>& paths) {
  NewRecords added{from.plan.records().tensor_states};
  if (added.pool.records == 0) return nullptr;
  std::vector<FlatGroup*> groups;
  for_each_trainable(from.units, [&](FlatGroup& group) {
    if (group.of_tensors.record < 0) return;
    groups.push_back(&group);
    added.sizes.push_back(static_cast<std::size_t>(from.plan.tensor_state_record_bytes_of(group.shape())));
    added.names.push_back("states of matrices of unit " + group.unit->name);
  });
  auto records =
      make_state_tier(from, paths, std::move(added), "tensor_states", from.plan.records().tensor_states_ahead());
  for (FlatGroup* group : groups) group->of_tensors.below = records;
  return records;
}

/// Makes the records of parameters, in the order of RecordPlan::parameters: first trainable groups, then frozen
/// ones.
std::shared_ptr<TierCarrier> make_parameter_records(const RecordSources& from, const std::vector<StripePath>& paths) {
  NewRecords added{from.plan.records().parameters};
  if (added.pool.records == 0) return nullptr;
  std::vector<FlatGroup*> groups;
  for (const bool trains : {true, false}) {
    for (const auto& unit : from.units) {
      for (const auto& group : unit->groups) {
        if (group->trainable == trains) groups.push_back(group.get());
      }
    }
  }
  for (FlatGroup* group : groups) {
    const Chunks& chunks = group->parameters_below.chunks;
    group->parameters_below.first_record = added.add(*group, group->parameter_part, chunks, [&](std::int64_t chunk) {
      return chunks.chunk(chunk).numel * group->element_bytes();
    });
  }
  auto records = make_state_tier(from, paths, std::move(added), "parameters", from.plan.records().queue_depth);
  for (FlatGroup* group : groups) {
    if (group->parameters_below.chunks.records() > 0) group->parameters_below.carrier = records;
  }
  return records;
}

/// Makes the carriers from the memory of a GPU's host to the GPU.
void make_carriers_to_gpu(TrainingMemory& memory, const RecordSources& from) {
  const MemoryPlan& plan = from.plan;
  if (memory.records.states && !plan.passes().steps_on_host) {
    const RecordPool& pool = plan.records().states;
    memory.gpu.states = make_slot_carrier(plan, memory.records.states, pool, memory.gpu.state_slots.data(),
                                          pool.device_slots, *from.kernels);
  }
  if (memory.records.tensor_states) {
    const RecordPool& pool = plan.records().tensor_states;
    // The slots that hold the batch of matrices under way on the GPU cannot hold records that are brought ahead.
    const std::int64_t ahead = pool.device_slots - plan.records().tensor_states_of_a_batch;
    memory.gpu.tensor_states = make_slot_carrier(plan, memory.records.tensor_states, pool,
                                                 memory.gpu.tensor_state_slots.data(), ahead, *from.kernels);
  }
  if (memory.records.parameters) {
    memory.gpu.parameters = std::make_shared<MappedCarrier>(memory.records.parameters, *from.kernels,
                                                            plan.records().parameters.held, !plan.parameters_on_host());
  }
}

/// Makes the records of gradients. Their files are scratch files on every path, because no commit needs gradients.
void make_gradient_records(TrainingMemory& memory, const RecordSources& from, const std::vector<StripePath>& paths) {
  const RecordPool& pool = from.plan.records().gradients;
  if (pool.records == 0) return;
  const int rank = from.rank();
  DeviceKernels* const kernels = from.kernels;
  NewRecords added{pool};
  for (const auto& unit : from.units) {
    const UnitShape shape = unit->shape();
    if (unit->index == 0 || shape.trainable_numel() == 0) continue;
    added.sizes.push_back(static_cast<std::size_t>(from.plan.gradient_record_bytes_of(shape)));
    added.names.push_back("gradients of unit " + unit->name);
  }
  const auto tell = [&](const std::string& where) {
    log_info("rank " + std::to_string(rank) + ": gradients: " + where);
  };
  const AlignedMemory::Give give = kernels ? pinned_memory_of(*kernels, rank, "gradients", kLessGradients) : nullptr;
  const auto in_slots = [&](std::unique_ptr<RecordTier> tier, FileTier* files) {
    memory.gpu.gradient_slots = Arena::shared("gradients on the device", pool.device_bytes(), *from.axes.reduce);
    std::byte* const slots = memory.gpu.gradient_slots.take(pool.device_bytes());
    memory.gpu.gradients =
        std::make_shared<DeviceGradients>(std::move(tier), files, pool.held, from.units, *kernels,
                                          DeviceGradients::Slots{slots, pool.record_bytes, pool.device_slots});
    tell(memory.gpu.gradients->describe());
  };
  if (pool.pinned_bytes > 0) return in_slots(host_tier(std::move(added), rank, give), nullptr);
  FileTierOptions options = tier_options(from, paths, std::move(added));
  options.read_ahead = options.write_behind = static_cast<int>(MemoryPlan::kGradientsAhead);
  options.most_held = static_cast<int>(kernels ? pool.held : from.plan.sums().units_under_way());
  options.memory = give;
  std::unique_ptr<FileTier> files = value_or_throw(FileTier::create(options));
  if (kernels) {
    FileTier* const same = files.get();
    return in_slots(std::move(files), same);
  }
  memory.records.gradients = std::make_shared<GradientRecords>(std::move(files), from.units);
  tell(memory.records.gradients->describe());
}

}  // namespace

void make_records(TrainingMemory& memory, const RecordSources& from) {
  const std::vector<StripePath> paths = stripe_paths(from);
  memory.records.parameters = make_parameter_records(from, paths);
  memory.records.states = make_state_records(from, paths);
  memory.records.tensor_states = make_tensor_state_records(from, paths);
  if (from.kernels) make_carriers_to_gpu(memory, from);
  memory.records.are_pinned = from.kernels != nullptr;
  memory.gpu.host_copies_bytes = from.plan.passes().host_copies_bytes;
  if (from.plan.passes().steps_on_host) {
    memory.gpu.host_copies = pinned_memory_of(*from.kernels, from.rank(), "copies of gradients and parameters",
                                              kLessCopies)(static_cast<std::size_t>(memory.gpu.host_copies_bytes));
  }
  make_gradient_records(memory, from, paths);
}

}  // namespace tessera
