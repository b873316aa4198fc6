#include "sharding/layout/memory_plan.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <span>

#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "sharding/layout/method_layout.h"
#include "sharding/layout/written_part.h"

namespace tessera {

std::string name_of(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::kParameters:
      return "parameters";
    case MemoryCategory::kSlots:
      return "slots";
    case MemoryCategory::kGradients:
      return "gradients";
    case MemoryCategory::kBuckets:
      return "buckets";
    case MemoryCategory::kMasters:
      return "masters";
    case MemoryCategory::kOptimizer:
      return "optimizer";
    case MemoryCategory::kStaging:
      return "staging";
    case MemoryCategory::kRecords:
      return "records";
    case MemoryCategory::kCheckpoint:
      return "checkpoint";
    case MemoryCategory::kActivations:
      return "activations";
    case MemoryCategory::kFeedback:
      return "feedback";
    case MemoryCategory::kHostRecords:
      return "host_records";
  }
  return "?";
}

std::int64_t MemoryUse::total() const { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }

std::int64_t MemoryUse::limited() const { return total() - (*this)[MemoryCategory::kHostRecords]; }

std::int64_t UnitShape::gathered_bytes() const {
  std::int64_t bytes = 0;
  for (const GroupShape& group : groups) bytes += group.gathered_bytes();
  return bytes;
}

Extent TensorStates::extent_of(std::size_t tensor) const {
  if (empty() || first[tensor] == first[tensor + 1]) return {};
  const std::int64_t begin = layout.extent(first[tensor]).offset;
  return {begin, layout.extent(first[tensor + 1] - 1).end() - begin};
}

std::int64_t UnitShape::trainable_numel() const {
  std::int64_t numel = 0;
  for (const GroupShape& group : groups) numel += group.trainable ? group.layout.numel() : 0;
  return numel;
}

std::int64_t UnitShape::trainable_parameters() const {
  std::int64_t count = 0;
  for (const GroupShape& group : groups) count += group.trainable ? static_cast<std::int64_t>(group.layout.size()) : 0;
  return count;
}

MemoryPlan::MemoryPlan(PlanInput input) : input_(std::move(input)) {
  // The root unit's gradients are in memory in any case.
  const auto trains = [](const UnitShape& unit) { return unit.trainable_numel() > 0; };
  if (input_.units.empty() || std::none_of(input_.units.begin() + 1, input_.units.end(), trains))
    input_.offload.gradients = Tier::kMemory;
  plan_parameters();
  plan_gradients();
  plan_parameter_records();
  plan_optimizer();
  matrices_ = MatrixDeal(input_.units, input_.placement.optimizer, input_.mesh, input_.matrix_work);
  use_[MemoryCategory::kStaging] += matrix_bytes();
  if (input_.copies_checkpoints) plan_checkpoint();
  plan_feedback();
  plan_activations();
  plan_outer();
  plan_image();
  if (gradients_below()) plan_gradient_records();  // which no commit needs
}

const StateFormats& MemoryPlan::states_of(const GroupShape& group) const {
  return group.matrices.empty() ? input_.states : input_.matrix_states;
}

bool MemoryPlan::parameters_below() const {
  const OffloadedState& parameters = input_.offload.parameters;
  const bool has_slots = input_.placement.parameters.shard && !input_.placement.keep_gathered;
  const bool is_below = parameters.tier == Tier::kNvme || parameters.tier == Tier::kHost;
  return has_slots && is_below && parameters.fraction > 0;
}

bool MemoryPlan::gathers() const {
  if (!input_.placement.parameters.shard) return false;
  return parameters_below() || (input_.mesh.shard_size > 1 && !input_.placement.shared);
}

std::int64_t MemoryPlan::gathers_in_step(std::size_t index) const {
  if (!gathers()) return 0;
  const auto count = static_cast<std::int64_t>(input_.units.size()), i = static_cast<std::int64_t>(index);
  if (i == 0 || input_.placement.keep_gathered || count - 1 <= shared_slots_) return 1;
  // Forward leaves the last units gathered, backward the first.
  const bool left_by_forward = i >= count - shared_slots_, left_by_backward = i <= shared_slots_;
  const std::int64_t rounds = input_.accumulation;
  return 1 + (left_by_forward ? 0 : rounds) + (left_by_backward ? 0 : rounds - 1);
}

void MemoryPlan::plan_parameters() {
  const bool shard_only = input_.placement.parameters.shard && !input_.placement.keep_gathered;
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      const auto element = static_cast<std::int64_t>(size_of(group.dtype));
      const std::int64_t numel = shard_only ? parameter_chunks_of(group).before_records() : group.layout.numel();
      use_[MemoryCategory::kParameters] += numel * element;
    }
  }
  if (!gathers() || input_.placement.keep_gathered) return;
  for (std::size_t i = 1; i < input_.units.size(); ++i) {
    slot_bytes_ = std::max(slot_bytes_, input_.units[i].gathered_bytes());
  }
  const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
  shared_slots_ = std::min(input_.prefetch + 1, others);
  const std::int64_t all_slots = input_.units[0].gathered_bytes() + shared_slots_ * slot_bytes_;
  use_[MemoryCategory::kSlots] = input_.placement.shared ? all_slots / input_.mesh.shard_size : all_slots;
}

Chunks MemoryPlan::parameter_chunks_of(const GroupShape& group) const {
  return parameter_chunks(owned(input_.placement.parameters, input_.mesh, group.layout.numel()).numel,
                          static_cast<std::int64_t>(size_of(group.dtype)), input_.offload.record_bytes,
                          parameters_below() ? input_.offload.parameters.fraction : 0);
}

std::int64_t MemoryPlan::bucket_bytes_of(const UnitShape& unit) const {
  const DType dtype = bucket_mode_ == BucketMode::kShared ? bucket_dtype() : DType::kF32;
  return unit.trainable_numel() * static_cast<std::int64_t>(size_of(dtype));
}

void MemoryPlan::plan_gradients() {
  const AxisPlacement axes = input_.placement.gradients;
  const int world = input_.mesh.world_size();
  const bool once = input_.accumulation == 1 || input_.sync == GradientSync::kLastMicrobatch;
  const bool replicated =
      !(axes.shard && input_.mesh.shard_size > 1) && !(axes.replicate && input_.mesh.replicate_size > 1);
  const bool has_place = !gradients_below();  // of its own, which its peers see
  if (has_place && (world == 1 || (replicated && input_.reduce == DType::kF32 && once))) {
    bucket_mode_ = BucketMode::kInPlace;
  } else if (input_.accumulation > 1 && input_.sync == GradientSync::kLastMicrobatch) {
    bucket_mode_ = BucketMode::kAccumulator;
  }
  std::int64_t largest_part = 0;  // of a unit
  for (std::size_t i = 0; i < input_.units.size(); ++i) {
    const UnitShape& unit = input_.units[i];
    std::int64_t part = 0;
    for (const GroupShape& group : unit.groups) {
      if (group.trainable) part += owned({axes.shard, false}, input_.mesh, group.layout.numel()).numel;
    }
    largest_part = std::max(largest_part, part);
    if (has_place || i == 0) use_[MemoryCategory::kGradients] += sum_bytes_of(unit);
    notes_numel_ = std::max(notes_numel_, unit.trainable_parameters());
    if (i > 0) bucket_bytes_ = std::max(bucket_bytes_, bucket_bytes_of(unit));
    if (i > 0) sum_bytes_ = std::max(sum_bytes_, sum_bytes_of(unit));
    if (bucket_mode_ == BucketMode::kAccumulator) use_[MemoryCategory::kBuckets] += bucket_bytes_of(unit);
  }
  // A reduction that is added to what earlier microbatches left, or that goes on over the replicate axis into a smaller
  // part, lands in scratch first.
  const bool adds = bucket_mode_ == BucketMode::kShared && input_.accumulation > 1;
  const bool narrows = axes.replicate && input_.mesh.replicate_size > 1;
  if (adds || narrows) scratch_numel_ = largest_part;
  plan_lag();
  if (bucket_mode_ == BucketMode::kShared) {
    const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
    shared_buckets_ = std::min(input_.filling_buckets + end_lag_, others);
    use_[MemoryCategory::kBuckets] = bucket_bytes_of(input_.units[0]) + shared_buckets_ * bucket_bytes_;
  }
  use_[MemoryCategory::kStaging] = units_under_way() * scratch_numel_ * 4;
  if (input_.updates_in_backward) plan_sums();
}

DType MemoryPlan::bucket_dtype() const { return input_.mesh.world_size() == 1 ? DType::kF32 : input_.reduce; }

std::int64_t MemoryPlan::sum_bytes_of(const UnitShape& unit) const {
  std::int64_t bytes = 0;
  for (const GroupShape& group : unit.groups) {
    if (group.trainable) bytes += owned(input_.placement.gradients, input_.mesh, group.layout.numel()).numel * 4;
  }
  return bytes;
}

void MemoryPlan::plan_sums() {
  constexpr std::int64_t kWholeLine = 16;  // fp32 of a cache line
  notes_numel_ = (notes_numel_ + kDigestBits + kWholeLine - 1) / kWholeLine * kWholeLine;
  const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
  const std::int64_t filling = bucket_mode_ == BucketMode::kInPlace ? input_.filling_buckets : 1;
  shared_sums_ = std::min(filling + end_lag_, others);
  use_[MemoryCategory::kGradients] =
      sum_bytes_of(input_.units[0]) + shared_sums_ * sum_bytes_ + units_under_way() * notes_numel_ * 4;
}

/// So many units after a unit its reduction can still be under way.
std::int64_t MemoryPlan::most_ahead() const {
  std::int64_t groups = 1;
  for (const UnitShape& unit : input_.units) {
    const auto trains = [](const GroupShape& group) { return group.trainable; };
    groups = std::max<std::int64_t>(groups, std::count_if(unit.groups.begin(), unit.groups.end(), trains));
  }
  if (input_.updates_in_backward) ++groups;  // what ranks tell each other of a unit is a reduction too
  return std::max(kMostUnderWay / groups, std::int64_t{1}) - 1;
}

/// Memory of a unit whose reduction is under way while others are computed, and that others use too.
std::int64_t MemoryPlan::bytes_ahead() const {
  const std::int64_t bucket = bucket_mode_ == BucketMode::kShared ? bucket_bytes_ : 0;
  const std::int64_t sum = input_.updates_in_backward || gradients_below() ? sum_bytes_ : 0;
  return bucket + sum + scratch_numel_ * 4;
}

void MemoryPlan::plan_lag() {
  constexpr std::int64_t kMostBought = 3, kRoom = 8 << 20;
  const bool two_axes = input_.mesh.replicate_size > 1;
  if (input_.mesh.world_size() == 1) return;
  if (input_.is_queued) {
    reduction_lag_ = two_axes ? 1 : 0;
    end_lag_ = reduction_lag_ + 1;
    return;
  }
  const std::int64_t most = most_ahead(), bytes = bytes_ahead();
  if (input_.reduces_in_background) {
    const std::int64_t ahead = std::min(input_.reductions_ahead.value_or(bytes == 0 ? most : 1), most);
    const bool begins_later = two_axes && ahead > 0;  // the sum over the replicate axis, by a unit
    end_lag_ = std::min(ahead + (begins_later ? 1 : 0), most);
    reduction_lag_ = begins_later ? 1 : end_lag_;
    return;
  }
  if (two_axes) return;  // the sum over the replicate axis follows that over the shard axis at once, so a rank waits
  if (input_.reductions_ahead) {
    end_lag_ = std::min(*input_.reductions_ahead, most);
    reduction_lag_ = (end_lag_ + 1) / 2;
    return;
  }
  reduction_lag_ = bytes == 0 ? most / 2 : std::min({most / 2, kMostBought, kRoom / (2 * bytes)});
  end_lag_ = 2 * reduction_lag_;
}

// A step reads and writes its states side by side. Where three streams lie a multiple of 128 MiB apart, give or take a page, it
// takes 2.8 times as long on processors of AMD's family 25; 8 KiB more between them are enough. So large pieces are an odd multiple
// of kApart long.
constexpr std::int64_t kLargePiece = std::int64_t{32} << 20, kApart = 16 << 10;

StatePiece state_piece(StateDType dtype, std::int64_t numel) {
  constexpr std::int64_t kCacheLine = 64;
  const auto whole_lines = [](std::int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; };
  const StateBytes bytes = state_bytes(dtype, numel);
  std::int64_t data = whole_lines(bytes.data);
  if (data >= kLargePiece) data = (data + 2 * kApart - 1) / (2 * kApart) * (2 * kApart) + kApart;
  return {data, whole_lines(bytes.scales)};
}

void MemoryPlan::plan_optimizer() {
  std::vector<std::int64_t> record_bytes;  // in the order of units
  std::vector<char> of_matrices;
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      if (!group.trainable) continue;
      const RecordLayout records = records_of(group);
      use_[MemoryCategory::kMasters] += master_bytes(input_.master, group.dtype, records.masters_in_memory());
      for (const StateDType dtype : states_of(group)) {
        use_[MemoryCategory::kOptimizer] += state_piece(dtype, records.states_in_memory()).bytes();
      }
      use_[MemoryCategory::kOptimizer] += 4 * tensor_state_part_of(group).numel;
      for (std::int64_t chunk = records.first_record(); chunk < records.chunks(); ++chunk) {
        record_bytes.push_back(records.record(chunk).bytes);
        of_matrices.push_back(group.matrices.empty() ? 0 : 1);
      }
    }
  }
  // Parameters are read more often than states, so they have the cache first.
  const std::int64_t cache = input_.offload.cache_bytes - parameter_records_.cached * parameter_records_.record_bytes;
  state_records_ =
      input_.is_queued ? plan_streamed_pool(record_bytes, cache) : plan_pool(record_bytes, cache, slots_of_queue());
  if (state_records_.pinned_bytes > 0) return;  // nothing of it is read from a disk
  UpdatedRecords updated;
  for (auto i = static_cast<std::size_t>(state_records_.cached); i < record_bytes.size(); ++i) {
    (of_matrices[i] ? updated.matrices : updated.elements).push_back(record_bytes[i]);
  }
  plan_updates(state_records_, updated, input_.first_pass_moves_states || !updated.matrices.empty());
}

Extent MemoryPlan::tensor_state_part_of(const GroupShape& group) const {
  return owned(input_.placement.optimizer, input_.mesh, group.tensor_states.numel());
}

RecordLayout MemoryPlan::records_of(const GroupShape& group) const {
  const auto share = [](const OffloadedState& state) {
    return state.tier == Tier::kNvme || state.tier == Tier::kHost ? state.fraction : 0.0;
  };
  TieredState state;
  state.master_bytes = master_bytes(input_.master, group.dtype, 1);
  state.states = states_of(group);
  state.masters_below = share(input_.offload.masters);
  state.states_below = share(input_.offload.moments);
  state.record_bytes = input_.offload.record_bytes;
  return {owned(input_.placement.optimizer, input_.mesh, group.layout.numel()).numel, state};
}

namespace {

/// What `bytes` take on a disk.
std::int64_t in_pages(std::int64_t bytes) { return (bytes + Chunks::kPage - 1) / Chunks::kPage * Chunks::kPage; }

std::int64_t sum(std::span<const std::int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

}  // namespace

RecordPool MemoryPlan::plan_pool(const std::vector<std::int64_t>& bytes, std::int64_t cache_bytes, std::int64_t slots) {
  RecordPool pool;
  if (bytes.empty()) return pool;
  pool.records = static_cast<std::int64_t>(bytes.size());
  pool.record_bytes = *std::max_element(bytes.begin(), bytes.end());
  pool.cached = std::min(cache_bytes / pool.record_bytes, pool.records);
  pool.slots = std::min(slots, pool.records - pool.cached);
  use_[MemoryCategory::kRecords] += pool.memory_bytes();
  disk_.bytes += sum(std::span(bytes).subspan(static_cast<std::size_t>(pool.cached)));
  return pool;
}

namespace {

/// Records in pinned memory of a GPU's host.
RecordPool pinned_pool(const std::vector<std::int64_t>& bytes) {
  RecordPool pool;
  pool.records = static_cast<std::int64_t>(bytes.size());
  pool.record_bytes = *std::max_element(bytes.begin(), bytes.end());
  pool.pinned_bytes = sum(bytes);
  return pool;
}

}  // namespace

/// Records in files that a GPU uses, `held` at once: their slots are memory of its host, and `more` of them for what is read ahead and
/// written behind.
RecordPool MemoryPlan::plan_files_of_gpu(const std::vector<std::int64_t>& bytes, std::int64_t cache_bytes,
                                         std::int64_t held, std::int64_t more) {
  RecordPool pool = plan_pool(bytes, cache_bytes, more + held);
  pool.held = held;
  use_[MemoryCategory::kRecords] -= pool.memory_bytes();
  return pool;
}

/// Records that go through a GPU: on their way from its host's memory and back they have slots on the GPU. Those in files have slots
/// on the host too: while they are on the GPU, read ahead, or written behind.
RecordPool MemoryPlan::plan_streamed_pool(const std::vector<std::int64_t>& bytes, std::int64_t cache_bytes) {
  if (bytes.empty()) return {};
  const bool on_host = input_.offload.masters.tier == Tier::kHost || input_.offload.moments.tier == Tier::kHost;
  const bool stays = on_host && input_.offload.step == OffloadedStep::kCpu;
  const std::int64_t under_way = std::min(slots_of_queue(), std::ssize(bytes));
  RecordPool pool =
      on_host ? pinned_pool(bytes) : plan_files_of_gpu(bytes, cache_bytes, under_way, 2 * input_.offload.queue_depth);
  pool.device_slots = stays ? 0 : under_way;
  use_[MemoryCategory::kRecords] += pool.device_bytes();
  use_[MemoryCategory::kHostRecords] += pool.memory_bytes();
  if (stays) {
    plan_host_step();
  } else {
    streamed_bytes_ = sum(bytes);
  }
  return pool;
}

void MemoryPlan::plan_host_step() {
  steps_on_host_ = true;
  for (const UnitShape& unit : input_.units) {
    const bool has_sums_on_host = input_.offload.gradients == Tier::kHost && &unit != &input_.units[0];
    for (const GroupShape& group : unit.groups) {
      if (!group.trainable) continue;
      const RecordLayout records = records_of(group);
      const std::int64_t numel = records.numel() - records.before_records();
      const Extent part = owned(input_.placement.optimizer, input_.mesh, group.layout.numel());
      const Extent parameters_part = owned(input_.placement.parameters, input_.mesh, group.layout.numel());
      const std::int64_t on_gpu = intersect({part.offset + records.before_records(), numel},
                                            {parameters_part.offset, parameter_chunks_of(group).before_records()})
                                      .numel;
      const std::int64_t gradients = has_sums_on_host ? 0 : 4 * numel;
      const std::int64_t parameters = on_gpu * static_cast<std::int64_t>(size_of(group.dtype));
      host_copies_bytes_ += gradients + parameters;
      host_step_.to_host += gradients + (holds_masters(input_.master, group.dtype) ? parameters : 0);
      host_step_.to_gpu += parameters;
    }
  }
  use_[MemoryCategory::kHostRecords] += host_copies_bytes_;
}

bool MemoryPlan::has_whole_records() const {
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      if (group.trainable && !records_of(group).are_whole()) return false;
    }
  }
  return true;
}

/// A pass over records reads all but those still in the slots from the last pass, and writes all that it changes. Passes go forward and
/// backward by turns, and with `updates_twice` all do in every step.
void MemoryPlan::plan_updates(const RecordPool& pool, const UpdatedRecords& records, bool first_pass_writes) {
  std::vector<std::int64_t> all = records.elements;
  all.insert(all.end(), records.matrices.begin(), records.matrices.end());
  const auto slots = static_cast<std::size_t>(pool.slots);
  const auto there_and_back = [&](std::span<const std::int64_t> moving) {
    const std::size_t held = std::min(slots, moving.size());
    // Updates in backward, and those of gradients on disk, always go the same way, so they find in the slots all records or none.
    const bool finds_none = (input_.updates_in_backward || gradients_below()) && held < moving.size();
    return 2 * sum(moving) - (finds_none ? 0 : sum(moving.first(held)) + sum(moving.last(held)));
  };
  if (!records.once_backward) {
    const std::span<const std::int64_t> again = input_.updates_twice ? all : records.matrices;
    disk_.read_in_two_steps += there_and_back(all) + there_and_back(again);
    disk_.written_in_two_steps += 2 * (sum(all) + (first_pass_writes ? sum(again) : 0));
    return;
  }
  // Two steps: elements forward, matrices backward, matrices backward, elements backward.
  const std::span<const std::int64_t> elements = records.elements, matrices = records.matrices;
  std::int64_t found = sum(elements.first(std::min(slots, elements.size())));
  if (matrices.size() <= slots) {
    found += sum(matrices) + sum(elements.last(std::min(slots - matrices.size(), elements.size())));
  }
  if (all.size() <= slots) found += sum(matrices);
  disk_.read_in_two_steps += 2 * sum(all) - found;
  disk_.written_in_two_steps += 2 * sum(all);
}

void MemoryPlan::plan_parameter_records() {
  std::vector<std::int64_t> bytes, gathers;
  std::vector<char> of_matrices;  // of those that train
  for (const bool trains : {true, false}) {
    for (std::size_t i = 0; i < input_.units.size(); ++i) {
      for (const GroupShape& group : input_.units[i].groups) {
        if (group.trainable != trains) continue;
        const Chunks chunks = parameter_chunks_of(group);
        for (std::int64_t chunk = chunks.first_record(); chunk < chunks.chunks(); ++chunk) {
          bytes.push_back(chunks.chunk(chunk).numel * static_cast<std::int64_t>(size_of(group.dtype)));
          gathers.push_back(gathers_in_step(i));
          if (trains) of_matrices.push_back(group.matrices.empty() ? 0 : 1);
        }
      }
    }
  }
  if (bytes.empty()) return;
  if (input_.is_queued) {
    for (std::size_t i = 0; i < bytes.size(); ++i) uploaded_bytes_ += gathers[i] * bytes[i];
    parameter_records_ = plan_uploaded_pool(bytes);
    if (parameters_on_host()) return;
  } else {
    parameter_records_ = plan_pool(bytes, input_.offload.cache_bytes, slots_of_queue());
  }
  UpdatedRecords updated;
  for (auto i = static_cast<std::size_t>(parameter_records_.cached); i < of_matrices.size(); ++i) {
    (of_matrices[i] ? updated.matrices : updated.elements).push_back(bytes[i]);
  }
  updated.once_backward = !updated.matrices.empty();
  plan_updates(parameter_records_, updated, /*first_pass_writes=*/false);
  for (std::size_t i = static_cast<std::size_t>(parameter_records_.cached); i < bytes.size(); ++i) {
    disk_.read_in_two_steps += 2 * gathers[i] * bytes[i];
  }
}

/// Records that gathers copy to a GPU. Its updates change them where they lie on the host.
RecordPool MemoryPlan::plan_uploaded_pool(const std::vector<std::int64_t>& bytes) {
  if (input_.offload.parameters.tier == Tier::kHost) {
    const RecordPool pool = pinned_pool(bytes);
    use_[MemoryCategory::kHostRecords] += pool.memory_bytes();
    return pool;
  }
  const std::int64_t held = std::min(slots_of_queue(), std::ssize(bytes));
  const RecordPool pool = plan_files_of_gpu(bytes, input_.offload.cache_bytes, held, 2 * input_.offload.queue_depth);
  for (const UnitShape& unit : input_.units) {
    std::int64_t in_files = 0;
    for (const GroupShape& group : unit.groups) {
      const Chunks chunks = parameter_chunks_of(group);
      in_files += (chunks.numel() - chunks.before_records()) * static_cast<std::int64_t>(size_of(group.dtype));
    }
    upload_piece_bytes_ = std::max(upload_piece_bytes_, in_files);
  }
  use_[MemoryCategory::kHostRecords] += pool.memory_bytes() + upload_pieces() * upload_piece_bytes_;
  return pool;
}

std::int64_t MemoryPlan::gradient_record_bytes_of(const UnitShape& unit) const { return in_pages(sum_bytes_of(unit)); }

/// Each microbatch writes all units' sums, the last unit's first, and reads them before, but for the first one. The update goes through
/// them from the first unit on, which finds in the slots what backward left there.
void MemoryPlan::plan_gradient_records() {
  std::vector<std::int64_t> bytes, updated;  // in the order of units; of those, what an update reads
  for (const UnitShape& unit : std::span(input_.units).subspan(1)) {
    if (unit.trainable_numel() == 0) continue;
    bytes.push_back(gradient_record_bytes_of(unit));
    updated.push_back(updates_by_device(unit) ? bytes.back() : 0);
  }
  if (input_.is_queued) {
    const std::int64_t device_slots = std::min(units_under_way() + 1, std::ssize(bytes));
    const std::int64_t held = std::min(device_slots + 1, std::ssize(bytes));
    gradient_records_ = input_.offload.gradients == Tier::kHost
                            ? pinned_pool(bytes)
                            : plan_files_of_gpu(bytes, /*cache_bytes=*/0, held, 2 * kGradientsAhead);
    gradient_records_.device_slots = device_slots;
    use_[MemoryCategory::kRecords] += gradient_records_.device_bytes();
    use_[MemoryCategory::kHostRecords] += gradient_records_.memory_bytes();
    plan_gradient_copies();
    if (gradient_records_.pinned_bytes > 0) return;
  } else {
    gradient_records_ = plan_pool(bytes, /*cache_bytes=*/0, units_under_way() + 2 * kGradientsAhead);
  }
  const std::int64_t all = sum(bytes), rounds = input_.accumulation;
  const auto slots = static_cast<std::size_t>(gradient_records_.slots);
  const std::int64_t again = slots < bytes.size() ? (rounds - 1) * all : 0;
  disk_.read_in_two_steps += 2 * (again + sum(std::span(updated).subspan(slots)));
  disk_.written_in_two_steps += 2 * rounds * all;
}

/// Whether the device that trains updates something of it, and not its host's CPU all.
bool MemoryPlan::updates_by_device(const UnitShape& unit) const {
  return std::ranges::any_of(unit.groups, [&](const GroupShape& group) {
    return group.trainable && (!steps_on_host() || records_of(group).before_records() > 0);
  });
}

/// Each microbatch copies all sums out, and in before but for the first one; the update copies those in that it needs there.
void MemoryPlan::plan_gradient_copies() {
  for (const UnitShape& unit : std::span(input_.units).subspan(1)) {
    const std::int64_t bytes = sum_bytes_of(unit);
    gradient_copies_.to_host += input_.accumulation * bytes;
    gradient_copies_.to_gpu += (input_.accumulation - 1 + (updates_by_device(unit) ? 1 : 0)) * bytes;
  }
}

void MemoryPlan::plan_image() {
  if (!input_.is_durable) return;
  image_bytes_ = use_[MemoryCategory::kMasters] + use_[MemoryCategory::kOptimizer];
  image_bytes_ += 4 * kept_gradient_numel_;
  for (const RecordPool& pool : {state_records_, parameter_records_})
    image_bytes_ += pool.cached * pool.record_bytes + pool.pinned_bytes;
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      image_bytes_ += parameter_chunks_of(group).before_records() * static_cast<std::int64_t>(size_of(group.dtype));
    }
  }
  disk_.durable_bytes = disk_.bytes;  // each record's other place
  std::vector<std::int64_t> bytes;
  for (std::int64_t left = image_bytes_; left > 0; left -= bytes.back()) {
    bytes.push_back(in_pages(std::min(left, input_.offload.record_bytes)));
  }
  const std::int64_t before = disk_.bytes;
  image_records_ = plan_pool(bytes, /*cache_bytes=*/0, slots_of_queue());
  if (input_.is_queued) {  // memory that the GPU copies to
    use_[MemoryCategory::kRecords] -= image_records_.memory_bytes();
    use_[MemoryCategory::kHostRecords] += image_records_.memory_bytes();
  }
  disk_.written_in_commit = sum(bytes);
  disk_.bytes = before;
  disk_.durable_bytes += 2 * disk_.written_in_commit;
}

void MemoryPlan::plan_checkpoint() {
  constexpr std::int64_t kCacheLine = 64;
  std::int64_t bytes = 0;
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      const AxisPlacement axes = group.trainable ? input_.placement.optimizer : input_.placement.parameters;
      const std::int64_t numel = most_written(axes, input_.mesh, group.layout.numel());
      if (!group.trainable) {
        bytes += numel * static_cast<std::int64_t>(size_of(group.dtype));
        continue;
      }
      bytes += numel * static_cast<std::int64_t>(sizeof(float));
      for (const StateDType dtype : states_of(group)) {
        const StateBytes state = state_bytes(dtype, numel);
        // Each tensor has scales of its own, the last of them for less than a block.
        const std::int64_t more_scales = state.scales > 0 ? static_cast<std::int64_t>(group.layout.size()) : 0;
        bytes += state.data + state.scales + more_scales * static_cast<std::int64_t>(sizeof(float));
      }
      bytes += 4 * most_written(axes, input_.mesh, group.tensor_states.numel());
      const FeedbackNumel feedback = feedback_numel_of(group);
      bytes += 4 * (feedback.shard + feedback.replicate + method_memory_of(group).kept);
    }
  }
  use_[MemoryCategory::kCheckpoint] = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

FeedbackNumel MemoryPlan::feedback_numel_of(const GroupShape& group) const {
  constexpr std::int64_t kLine = 16;
  if (!input_.compression.error_feedback || !group.trainable) return {};
  const auto part_of = [](std::int64_t numel, int part) {
    return part == 0 ? 0 : (numel + part * kLine - 1) / (part * kLine) * kLine;
  };
  const std::int64_t numel = group.layout.numel();
  const std::int64_t summed = owned({input_.placement.gradients.shard, false}, input_.mesh, numel).numel;
  return {part_of(numel, input_.compressed_shard_part), part_of(summed, input_.compressed_replicate_part)};
}

MethodMemory MemoryPlan::method_memory_of(const GroupShape& group) const {
  if (!group.trainable || input_.compressed_shard_part == 0) return {};
  return method_memory(input_.compression, group, input_.mesh.shard_size);
}

void MemoryPlan::plan_feedback() {
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      const FeedbackNumel kept = feedback_numel_of(group);
      const MethodMemory method = method_memory_of(group);
      kept_gradient_numel_ += kept.shard + kept.replicate + method.kept;
      method_work_numel_ = std::max(method_work_numel_, method.work);
    }
  }
  const std::int64_t copies = input_.compression.restore_skipped ? 2 : 1;
  use_[MemoryCategory::kFeedback] = (method_work_numel_ + copies * kept_gradient_numel_) * 4;
}

void MemoryPlan::plan_outer() {
  if (!input_.outer.makes_outer_steps()) return;
  std::int64_t largest = 0, part = 0;
  std::vector<std::int64_t> fragments(static_cast<std::size_t>(input_.outer.fragments));
  for (std::size_t unit = 0; unit < input_.units.size(); ++unit) {
    for (const GroupShape& group : input_.units[unit].groups) {
      if (!group.trainable) continue;
      largest = std::max(largest, group.layout.numel());
      const std::int64_t own = owned(input_.placement.optimizer, input_.mesh, group.layout.numel()).numel;
      part += own;
      fragments[unit % fragments.size()] += own;
    }
  }
  const bool streams = input_.outer.type == SyncType::kStreamingDiloco;
  outer_numel_ = {part, largest, streams ? std::ranges::max(fragments) : 0};
  const std::int64_t states = input_.outer.has_outer_optimizer() ? 2 : 0;
  use_[MemoryCategory::kOptimizer] += 4 * states * part;
  use_[MemoryCategory::kStaging] += 4 * outer_numel_.staging();
}

/// On a GPU's host they take memory as they come, which no plan knows.
void MemoryPlan::plan_activations() {
  const OffloadConfig& offload = input_.offload;
  if (offload.activations != Tier::kNvme) return;
  const std::int64_t piece = in_pages(offload.record_bytes);
  use_[input_.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kActivations] +=
      (2 * offload.queue_depth + 1) * piece;
}

std::vector<const RecordPool*> MemoryPlan::pools_in_files() const {
  std::vector<const RecordPool*> pools = {&parameter_records_, &state_records_, &gradient_records_};
  std::erase_if(pools, [](const RecordPool* pool) { return pool->records == 0 || pool->pinned_bytes > 0; });
  return pools;
}

std::int64_t MemoryPlan::records_on_disk() const {
  std::int64_t records = 0;
  for (const RecordPool* pool : pools_in_files()) records += pool->records;
  return records;
}

std::string MemoryPlan::to_table() const {
  static const char* const kWhat[kMemoryCategories] = {
      "this rank's part of the parameters",
      "units gathered for compute",
      "reduced gradients, fp32",
      "gradients on their way to the reduction",
      "what fp32 masters have beyond the parameters",
      "optimizer state",
      "scratch",
      "records of what lies below memory, used, on their way, or cached",
      "copy of what an asynchronous save writes, in host memory",
      "saved tensors on their way to and from their tier",
      "what gradients on the wire lacked, and their factors, fp32",
      "records in pinned memory of the host, for its GPU"};
  using Align = TextTable::Align;
  TextTable table(
      {{"category"}, {"bytes", Align::kRight}, {"per rank", Align::kRight}, {"share", Align::kRight}, {"what"}});
  const auto add = [&](const std::string& name, std::int64_t bytes, const std::string& what) {
    const double share =
        use_.total() > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(use_.total()) : 0.0;
    char text[16];
    std::snprintf(text, sizeof text, "%.1f %%", share);
    table.add_row({name, std::to_string(bytes), format_bytes(bytes), text, what});
  };
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    add(name_of(static_cast<MemoryCategory>(i)), use_.bytes[i], kWhat[i]);
  }
  table.add_rule();
  add("total", use_.total(), "without activations and the module's buffers");
  if (use_.limited() < use_.total()) add("of the GPU", use_.limited(), "the total without host_records");
  std::string text = table.to_string();
  if (streamed_bytes_ > 0) {
    text += "through the GPU: a step copies " + format_bytes(streamed_bytes_) + " (" + std::to_string(streamed_bytes_) +
            " bytes) of " + std::to_string(state_records_.records) + " records of at most " +
            format_bytes(state_records_.record_bytes) + " there, and as much back\n";
    if (state_records_.pinned_bytes > 0 && input_.offload.step == OffloadedStep::kAuto && can_step_on_host()) {
      text +=
          "offload.step auto: what is measured when the Engine is made may give the update to the CPU of the host, "
          "which needs less memory of the GPU and more of the host\n";
    }
  }
  if (steps_on_host()) {
    text += "by the CPU of the host: a step copies " + format_bytes(host_step_.to_host) + " (" +
            std::to_string(host_step_.to_host) + " bytes) there, updates " + std::to_string(state_records_.records) +
            " records of at most " + format_bytes(state_records_.record_bytes) + ", and copies " +
            format_bytes(host_step_.to_gpu) + " (" + std::to_string(host_step_.to_gpu) + " bytes) back\n";
  }
  if (uploaded_bytes_ > 0) {
    text += "to the GPU: a step copies " + format_bytes(uploaded_bytes_) + " (" + std::to_string(uploaded_bytes_) +
            " bytes) of parameters there for gathers, and updates them where they lie, in " +
            std::to_string(parameter_records_.records) + " records of at most " +
            format_bytes(parameter_records_.record_bytes) + " on the host\n";
  }
  if (gradient_copies_.to_host > 0) {
    text += "gradients: a step copies " + format_bytes(gradient_copies_.to_host) + " (" +
            std::to_string(gradient_copies_.to_host) + " bytes) of sums to the host, and " +
            format_bytes(gradient_copies_.to_gpu) + " (" + std::to_string(gradient_copies_.to_gpu) +
            " bytes) back to the GPU\n";
  }
  const std::int64_t records = records_on_disk();
  if (records > 0) {
    std::int64_t largest = 0;
    for (const RecordPool* pool : pools_in_files()) largest = std::max(largest, pool->record_bytes);
    text += "on disk: " + format_bytes(disk_.bytes) + " (" + std::to_string(disk_.bytes) + " bytes) in " +
            std::to_string(records) + " records of at most " + format_bytes(largest) + "; a step reads " +
            format_bytes(disk_.read_in_two_steps / 2) + " and writes " + format_bytes(disk_.written_in_two_steps / 2) +
            "\n";
  }
  if (input_.is_durable) {
    text += "durable: " + format_bytes(disk_.durable_bytes) + " more on disk; a commit writes at most " +
            format_bytes(disk_.written_in_commit) + " from memory\n";
  }
  if (input_.offload.activations != Tier::kMemory) {
    const bool on_disk = input_.offload.activations == Tier::kNvme;
    text += std::string("activations: tensors of at least ") + format_bytes(input_.offload.activations_min_bytes) +
            " that forward saves go to " + (on_disk ? "the disk" : "pinned memory of the host") +
            "; how many bytes, the log says after the first step\n";
  }
  return text;
}

}  // namespace tessera
