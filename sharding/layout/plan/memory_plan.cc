#include "sharding/layout/plan/memory_plan.h"

#include <algorithm>
#include <numeric>

#include "runtime/base/wire/wire_block.h"
#include "sharding/layout/plan/sum_counter.h"
#include "sharding/layout/written_part.h"

namespace tessera {
namespace {

std::int64_t in_cache_lines(std::int64_t bytes) { return rounded_up(bytes, 64); }

}  // namespace

std::int64_t MemoryUse::total() const { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }

std::int64_t MemoryUse::limited() const { return total() - (*this)[MemoryCategory::kHostRecords]; }

// Plans the memory of a rank. The constructor plans category after category. Each `plan_...` function adds bytes to
// `use_`, and keeps the sizes that the engine needs to allocate them. Parameters and slots are planned first, then
// gradients with buckets and scratch (`plan_gradients`; `plan_lag` chooses the lag of reductions), then optimizer state
// and matrices. The copy of a checkpoint, error feedback, activations and outer steps are planned last. Offloaded
// state, and the image of a commit, which consists of the other categories, are planned in memory_plan_records.cc.
MemoryPlan::MemoryPlan(PlanInput input) : input_(std::move(input)) {
  // The root unit's gradients are in memory in any case.
  const auto trains = [](const UnitShape& unit) { return unit.trainable_numel() > 0; };
  if (input_.units.empty() || std::none_of(input_.units.begin() + 1, input_.units.end(), trains))
    input_.tiers.gradients = Tier::kMemory;
  records_.queue_depth = chosen_queue_depth();
  plan_first_pass();
  plan_parameters();
  plan_gradients();
  // The records are the same whether or not values are published after the update has returned.
  const std::vector<StepProgram> steps = step_programs(step_input(/*gathers_in_background=*/false));
  plan_parameter_records(steps);
  plan_optimizer(steps);
  plan_weight_copy();
  if (!input_.update.outer.has_common_parameters()) {
    passes_.matrices = MatrixDeal(input_.units, input_.placement.optimizer, input_.placement.mesh,
                                  input_.update.matrix_work, input_.update.in_backward);
  }
  use_[MemoryCategory::kStaging] += matrix_bytes();
  plan_tensor_states(steps);
  if (input_.tiers.copies_checkpoints) plan_checkpoint();
  plan_feedback();
  plan_activations();
  plan_outer();
  plan_image();
  if (gradients_below()) plan_gradient_records(steps);  // planned here, since no commit needs gradients
}

const StateFormats& MemoryPlan::states_of(const GroupShape& group) const {
  return group.matrices.empty() ? input_.update.states : input_.update.matrix_states;
}

bool MemoryPlan::parameters_below() const {
  const OffloadedState& parameters = input_.tiers.parameters;
  const bool has_slots = input_.placement.parameters.shard && !input_.placement.keep_gathered;
  const bool is_below = parameters.tier == Tier::kNvme || parameters.tier == Tier::kHost;
  return has_slots && is_below && parameters.fraction > 0;
}

bool MemoryPlan::gathers() const {
  if (!input_.placement.parameters.shard) return false;
  return parameters_below() || (input_.placement.mesh.shard_size > 1 && !input_.placement.shared);
}

std::int64_t MemoryPlan::gathers_in_step(std::size_t index) const {
  if (!gathers()) return 0;
  const auto count = static_cast<std::int64_t>(input_.units.size()), i = static_cast<std::int64_t>(index);
  if (i == 0 || input_.placement.keep_gathered || count - 1 <= slots_.shared_slots) return 1;
  // After forward the last units are still gathered, and after backward the first units are.
  const bool left_by_forward = i >= count - slots_.shared_slots, left_by_backward = i <= slots_.shared_slots;
  const std::int64_t rounds = input_.wire.accumulation;
  return 1 + (left_by_forward ? 0 : rounds) + (left_by_backward ? 0 : rounds - 1);
}

void MemoryPlan::plan_parameters() {
  const bool shard_only = input_.placement.parameters.shard && !input_.placement.keep_gathered;
  for_each_group(input_.units, [&](const GroupShape& group) {
    const std::int64_t numel = shard_only ? parameter_chunks_of(group).before_records() : group.layout.numel();
    use_[MemoryCategory::kParameters] += numel * group.element_bytes();
  });
  if (!gathers() || input_.placement.keep_gathered) return;
  for (std::size_t i = 1; i < input_.units.size(); ++i) {
    slots_.slot_bytes = std::max(slots_.slot_bytes, input_.units[i].gathered_bytes());
  }
  const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
  slots_.shared_slots = std::min(input_.placement.prefetch + 1, others);
  const std::int64_t all_slots = input_.units[0].gathered_bytes() + slots_.shared_slots * slots_.slot_bytes;
  use_[MemoryCategory::kSlots] = input_.placement.shared ? all_slots / input_.placement.mesh.shard_size : all_slots;
  use_[MemoryCategory::kParameters] += secondary_bytes();
  use_[MemoryCategory::kSlots] += secondary_codes_bytes();
}

bool MemoryPlan::rounds_secondary(DType dtype) const {
  const bool is_floating = dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
  return input_.placement.secondary.is_rounded() && is_floating;
}

/// Returns the bytes of a group's part of the second copy. Codes of wire_codec.h need one byte for each element, and an
/// fp32 scale for every 256 elements.
std::int64_t MemoryPlan::secondary_bytes_of(const GroupShape& group) const {
  constexpr std::int64_t kBlock = 256;
  const std::int64_t numel = group.layout.numel() / input_.placement.secondary.ranks;
  return in_cache_lines(rounds_secondary(group.dtype) ? numel + (numel + kBlock - 1) / kBlock * 4
                                                      : numel * group.element_bytes());
}

std::int64_t MemoryPlan::secondary_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < input_.units.size(); ++i) {
    if (!secondary_holds(i)) continue;
    for (const GroupShape& group : input_.units[i].groups) bytes += secondary_bytes_of(group);
  }
  return bytes;
}

std::int64_t MemoryPlan::secondary_codes_bytes() const {
  std::int64_t bytes = 0;
  if (!has_secondary()) return bytes;
  for_each_group(input_.units, [&](const GroupShape& group) {
    if (rounds_secondary(group.dtype))
      bytes = std::max(bytes, input_.placement.secondary.ranks * secondary_bytes_of(group));
  });
  return bytes;
}

Chunks MemoryPlan::parameter_chunks_of(const GroupShape& group) const {
  return parameter_chunks(owned(input_.placement.parameters, input_.placement.mesh, group.layout.numel()).numel,
                          group.element_bytes(), input_.tiers.record_bytes,
                          parameters_below() ? input_.tiers.parameters.fraction : 0);
}

std::int64_t MemoryPlan::bucket_bytes_of(const UnitShape& unit) const {
  const DType dtype = sums_.bucket_mode == BucketMode::kShared ? bucket_dtype() : DType::kF32;
  return unit.trainable_numel() * static_cast<std::int64_t>(size_of(dtype));
}

void MemoryPlan::plan_gradients() {
  const AxisPlacement axes = input_.placement.gradients;
  const int world = input_.placement.mesh.world_size();
  const bool last = input_.wire.sync == GradientSync::kLastMicrobatch, once = input_.wire.accumulation == 1 || last;
  const bool replicated = !(axes.shard && input_.placement.mesh.shard_size > 1) &&
                          !(axes.replicate && input_.placement.mesh.replicate_size > 1);
  const bool has_place = !gradients_below();  // offloaded sums lie in records instead
  if (has_place && (world == 1 || (replicated && input_.wire.reduce == DType::kF32 && once))) {
    sums_.bucket_mode = BucketMode::kInPlace;
  } else if ((input_.wire.accumulation > 1 || input_.wire.reproducible) && last) {
    sums_.bucket_mode = BucketMode::kAccumulator;
  }
  std::int64_t largest_part = 0;  // largest part of any unit
  for (std::size_t i = 0; i < input_.units.size(); ++i) {
    const UnitShape& unit = input_.units[i];
    std::int64_t part = 0;
    for (const GroupShape& group : unit.groups) {
      if (group.trainable) part += shard_sum_numel_of(group);
    }
    largest_part = std::max(largest_part, part);
    if (has_place || i == 0) use_[MemoryCategory::kGradients] += sum_bytes_of(unit);
    sums_.notes_numel = std::max(sums_.notes_numel, unit.trainable_parameters());
    if (i > 0) sums_.bucket_bytes = std::max(sums_.bucket_bytes, bucket_bytes_of(unit));
    if (i > 0) sums_.sum_bytes = std::max(sums_.sum_bytes, sum_bytes_of(unit));
    if (sums_.bucket_mode == BucketMode::kAccumulator) use_[MemoryCategory::kBuckets] += bucket_bytes_of(unit);
  }
  // The result of a reduction is first written to scratch memory if it is added to sums of earlier microbatches. The
  // same holds if it is reduced again over the replicate axis into a smaller part.
  const bool adds = sums_.bucket_mode == BucketMode::kShared && input_.wire.accumulation > 1;
  const bool narrows = axes.replicate && input_.placement.mesh.replicate_size > 1;
  plan_tree();
  if (adds || (narrows && sums_.block_sums == 0)) sums_.scratch_numel = largest_part;
  plan_lag();
  if (sums_.bucket_mode == BucketMode::kShared) {
    const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
    sums_.shared_buckets = std::min(input_.wire.filling_buckets + sums_.end_lag, others);
    use_[MemoryCategory::kBuckets] = bucket_bytes_of(input_.units[0]) + sums_.shared_buckets * sums_.bucket_bytes;
  }
  use_[MemoryCategory::kStaging] =
      sums_.units_under_way() * sums_.scratch_numel * 4 + waiting_bytes() + block_exchange_numel() * 4;
  use_[input_.placement.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kStaging] += statistics_bytes();
  if (input_.update.in_backward) plan_sums();
}

std::int64_t MemoryPlan::statistics_message_bytes() const {
  return order().most_rounds() * input_.wire.statistics_numel * 8;
}

std::int64_t MemoryPlan::statistics_bytes() const {
  const std::int64_t ranks = input_.placement.mesh.world_size();
  return statistics_message_bytes() * (1 + (ranks > 1 ? ranks : 0));
}

bool MemoryPlan::keeps_gradients() const {
  if (input_.update.in_backward) return false;
  if (input_.placement.mesh.world_size() == 1 && !gradients_below()) return true;
  const bool for_tree = input_.wire.reproducible && input_.wire.sync == GradientSync::kLastMicrobatch;
  return sums_.bucket_mode == BucketMode::kAccumulator ||
         (sums_.bucket_mode == BucketMode::kInPlace && (input_.wire.accumulation > 1 || for_tree));
}

MicrobatchOrder MemoryPlan::order() const {
  const bool has_runs =
      input_.wire.longest_run > 0 || (input_.wire.reproducible && input_.wire.sync == GradientSync::kLastMicrobatch);
  MicrobatchOrder order{input_.placement.mesh.world_size(), input_.wire.accumulation, has_runs,
                        input_.wire.longest_run};
  order.backups = input_.wire.backups;
  order.total = input_.wire.microbatches;
  return order;
}

/// Plans the sums of "reproducible": those that wait to be added, and those that ranks send if their runs of
/// microbatches are not whole subtrees.
void MemoryPlan::plan_tree() {
  constexpr std::int64_t kMostSent = 1 << 18, kAlignment = 256;  // numbers of fp32 elements; the second is
                                                                 // SumVisitor::kAlignment
  if (!input_.wire.reproducible) return;
  const MicrobatchOrder order = this->order();
  const int places = SumCounter(input_.wire.accumulation).places();
  sums_.waiting_sums = keeps_gradients() ? places : std::max(places - 1, 0);
  if (!cuts_subtrees(order, input_.placement.mesh)) return;
  const bool is_dealt = order.longest > 0;
  sums_.waiting_sums = is_dealt ? most_places(order.longest) : 0;
  sums_.block_sums = is_dealt ? most_blocks(order.longest) : 0;
  for (int rank = 0; rank < order.ranks; ++rank) {
    const SumCounter counter(order.run_of(rank), order.all());
    sums_.waiting_sums = std::max(sums_.waiting_sums, counter.places());
    sums_.block_sums = std::max(sums_.block_sums, counter.blocks());
  }
  sums_.waiting_sums += static_cast<int>(order.backups);
  sums_.block_sums += static_cast<int>(order.backups);
  std::int64_t largest = 1;
  for_each_trainable(input_.units, [&](const GroupShape& group) { largest = std::max(largest, group.layout.numel()); });
  const std::int64_t part = rounded_up((largest + order.ranks - 1) / order.ranks, kAlignment);
  const std::int64_t sent = kMostSent / (order.ranks * sums_.block_sums) / kAlignment * kAlignment;
  sums_.block_piece_numel = std::clamp(sent, kAlignment, part);
}

std::int64_t MemoryPlan::block_exchange_numel() const {
  const std::int64_t pieces = input_.placement.mesh.world_size() * sums_.block_piece_numel;
  return 2 * sums_.block_sums * pieces + (joins_own_parts() ? 0 : pieces);
}

std::int64_t MemoryPlan::block_bytes_of_step() const {
  const std::int64_t ranks = input_.placement.mesh.world_size(), sums = sums_.block_sums + (joins_own_parts() ? 0 : 1);
  std::int64_t bytes = 0;
  if (sums_.block_sums == 0) return bytes;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    bytes += sums * (ranks - 1) * 4 * ((group.layout.numel() + ranks - 1) / ranks);
  });
  return bytes;
}

std::int64_t MemoryPlan::waiting_numel_of(const UnitShape& unit) const {
  return keeps_gradients() ? unit.trainable_numel() : sum_bytes_of(unit) / 4;
}

std::int64_t MemoryPlan::waiting_bytes() const {
  std::int64_t numel = 0;
  for (const UnitShape& unit : input_.units) numel += waiting_numel_of(unit);
  return sums_.waiting_sums * numel * 4;
}

DType MemoryPlan::bucket_dtype() const {
  return input_.placement.mesh.world_size() == 1 ? DType::kF32 : input_.wire.reduce;
}

std::int64_t MemoryPlan::sum_bytes_of(const UnitShape& unit) const {
  std::int64_t bytes = 0;
  for (const GroupShape& group : unit.groups) {
    if (group.trainable)
      bytes += owned(input_.placement.gradients, input_.placement.mesh, group.layout.numel()).numel * 4;
  }
  return bytes;
}

void MemoryPlan::plan_sums() {
  constexpr std::int64_t kWholeLine = 16;  // fp32 elements of a cache line
  sums_.notes_numel = rounded_up(sums_.notes_numel + kDigestBits + 2, kWholeLine);
  const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
  const std::int64_t filling = sums_.bucket_mode == BucketMode::kInPlace ? input_.wire.filling_buckets : 1;
  sums_.shared_sums = std::min(filling + sums_.end_lag, others);
  use_[MemoryCategory::kGradients] = sum_bytes_of(input_.units[0]) + sums_.shared_sums * sums_.sum_bytes +
                                     sums_.units_under_way() * sums_.notes_numel * 4;
}

/// Returns the largest number of further units during which a unit's reduction can still be under way.
std::int64_t MemoryPlan::most_ahead() const {
  std::int64_t groups = 1;
  for (const UnitShape& unit : input_.units) {
    const auto trains = [](const GroupShape& group) { return group.trainable; };
    groups = std::max<std::int64_t>(groups, std::count_if(unit.groups.begin(), unit.groups.end(), trains));
  }
  if (input_.update.in_backward) ++groups;  // the notes of ranks about a unit are also sent by a reduction
  return std::max(kMostUnderWay / groups, std::int64_t{1}) - 1;
}

/// Returns the bytes that a unit needs, of memory that units share, while its reduction is under way and other units
/// are computed.
std::int64_t MemoryPlan::bytes_ahead() const {
  const std::int64_t bucket = sums_.bucket_mode == BucketMode::kShared ? sums_.bucket_bytes : 0;
  const std::int64_t sum = input_.update.in_backward || gradients_below() ? sums_.sum_bytes : 0;
  return bucket + sum + sums_.scratch_numel * 4;
}

void MemoryPlan::plan_lag() {
  constexpr std::int64_t kMostBought = 3, kRoom = 8 << 20;
  const bool two_axes = input_.placement.mesh.replicate_size > 1;
  if (input_.placement.mesh.world_size() == 1 || sums_.block_sums > 0) return;  // blocks are sent without delay
  if (input_.placement.is_queued) {
    sums_.reduction_lag = two_axes || sums_on_host() ? 1 : 0;
    sums_.end_lag = sums_.reduction_lag + 1;
    return;
  }
  const std::int64_t most = most_ahead(), bytes = bytes_ahead();
  if (input_.wire.reduces_in_background) {
    const std::int64_t ahead = std::min(input_.wire.reductions_ahead.value_or(bytes == 0 ? most : 1), most);
    const bool begins_later = two_axes && ahead > 0;  // the sum over the replicate axis begins one unit later
    sums_.end_lag = std::min(ahead + (begins_later ? 1 : 0), most);
    sums_.reduction_lag = begins_later ? 1 : sums_.end_lag;
    return;
  }
  // the sum over the replicate axis directly follows the sum over the shard axis, so a rank waits
  if (two_axes) return;
  if (input_.wire.reductions_ahead) {
    sums_.end_lag = std::min(*input_.wire.reductions_ahead, most);
    sums_.reduction_lag = (sums_.end_lag + 1) / 2;
    return;
  }
  sums_.reduction_lag = bytes == 0 ? most / 2 : std::min({most / 2, kMostBought, kRoom / (2 * bytes)});
  sums_.end_lag = 2 * sums_.reduction_lag;
}

// A step reads and writes its states side by side. If the distances between three streams are multiples of 128 MiB, to
// within a page, the step takes 2.8 times as long on processors of AMD's family 25. 8 KiB more between the streams are
// enough to avoid that. Large pieces therefore have a length that is an odd multiple of kApart (16 KiB).
constexpr std::int64_t kLargePiece = std::int64_t{32} << 20, kApart = 16 << 10;

StatePiece state_piece(StateDType dtype, std::int64_t numel) {
  const StateBytes bytes = state_bytes(dtype, numel);
  std::int64_t data = in_cache_lines(bytes.data);
  if (data >= kLargePiece) data = rounded_up(data, 2 * kApart) + kApart;
  return {data, in_cache_lines(bytes.scales)};
}

void MemoryPlan::plan_optimizer(Steps steps) {
  RecordList records;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const RecordLayout layout = records_of(group);
    use_[MemoryCategory::kMasters] += master_bytes(input_.update.master, group.dtype, layout.masters_in_memory());
    for (const StateDType dtype : states_of(group))
      use_[MemoryCategory::kOptimizer] += state_piece(dtype, layout.states_in_memory()).bytes();
    for (std::int64_t chunk = layout.first_record(); chunk < layout.chunks(); ++chunk)
      records.bytes.push_back(layout.record(chunk).bytes);
    records.end_owner();
  });
  // Parameters get the cache first, since they are read more often than states.
  const Cache cache{input_.tiers.cache_bytes - records_.parameters.cached * records_.parameters.record_bytes};
  records_.states = input_.placement.is_queued ? plan_streamed_pool(records.bytes, cache)
                                               : plan_pool(records.bytes, cache, slots_of_queue());
  if (records_.states.device_slots > 0)
    records_.streamed_bytes += moves_in_two_steps(steps, RecordKind::kStates, records, /*slots=*/0).read / 2;
  count(steps, RecordKind::kStates, records, records_.states);
}

Extent MemoryPlan::tensor_state_part_of(const GroupShape& group) const {
  return owned(input_.placement.optimizer, input_.placement.mesh, group.tensor_states.numel());
}

RecordLayout MemoryPlan::records_of(const GroupShape& group) const {
  TieredState state;
  state.master_bytes = master_bytes(input_.update.master, group.dtype, 1);
  state.states = states_of(group);
  state.masters_below = share_below(input_.tiers.masters);
  state.states_below = share_below(input_.tiers.moments);
  state.record_bytes = input_.tiers.record_bytes;
  return {optimizer_part_of(group).numel, state};
}

void MemoryPlan::plan_checkpoint() {
  std::int64_t bytes = 0;
  for_each_group(input_.units, [&](const GroupShape& group) {
    const AxisPlacement axes = group.trainable ? input_.placement.optimizer : input_.placement.parameters;
    const std::int64_t numel = most_written(axes, input_.placement.mesh, group.layout.numel());
    bytes += numel * (group.trainable ? std::int64_t{sizeof(float)} : group.element_bytes());
    if (!group.trainable) return;
    for (const StateDType dtype : states_of(group)) {
      const StateBytes state = state_bytes(dtype, numel);
      // Each tensor has its own scales. A tensor's last scale may be for less than a block.
      const std::int64_t more_scales = state.scales > 0 ? static_cast<std::int64_t>(group.layout.size()) : 0;
      bytes += state.data + state.scales + more_scales * std::int64_t{sizeof(float)};
    }
    bytes += 4 * most_written(axes, input_.placement.mesh, group.tensor_states.numel());
    const FeedbackNumel feedback = feedback_numel_of(group);
    bytes += 4 * (feedback.shard + feedback.replicate + method_layout_of(group).memory.kept);
  });
  use_[MemoryCategory::kCheckpoint] = in_cache_lines(bytes);
}

FeedbackNumel MemoryPlan::feedback_numel_of(const GroupShape& group) const {
  constexpr std::int64_t kLine = 16;
  if (!input_.wire.compression.error_feedback || !is_lossy(input_.wire.compression.gradients) || !group.trainable)
    return {};
  const auto part_of = [](std::int64_t numel, int part) {
    return part == 0 ? 0 : rounded_up(numel, part * kLine) / part;
  };
  return {part_of(group.layout.numel(), input_.wire.compressed_shard_part),
          part_of(shard_sum_numel_of(group), input_.wire.compressed_replicate_part)};
}

MethodLayout MemoryPlan::method_layout_of(const GroupShape& group) const {
  if (!group.trainable || input_.wire.compressed_shard_part == 0) return {};
  return method_layout(input_.wire.compression.method, group, input_.placement.mesh.shard_size);
}

void MemoryPlan::plan_feedback() {
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const FeedbackNumel kept = feedback_numel_of(group);
    const MethodMemory method = method_layout_of(group).memory;
    sums_.kept_gradient_numel += kept.shard + kept.replicate + method.kept;
    sums_.method_work_numel = std::max(sums_.method_work_numel, method.work);
  });
  const std::int64_t copies = input_.wire.compression.restore_skipped ? 2 : 1;
  const MemoryCategory where = input_.placement.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kFeedback;
  use_[where] += (sums_.method_work_numel + copies * sums_.kept_gradient_numel) * 4;
  use_[MemoryCategory::kHostRecords] += shard_sums_on_host().bytes() + replicate_sums_on_host().bytes();
  use_[MemoryCategory::kHostRecords] += gathers_on_host().bytes() + replica_gathers_on_host().bytes();
}

/// Returns whether a GPU's host makes the sums on some axis. The host makes sums that are compressed.
bool MemoryPlan::sums_on_host() const {
  return input_.placement.is_queued &&
         (input_.wire.compressed_shard_part > 0 || input_.wire.compressed_replicate_part > 0);
}

/// Returns the largest number of reductions of groups over one axis that are under way at once.
std::int64_t MemoryPlan::reductions_under_way() const {
  std::int64_t most = 0;
  for (const UnitShape& unit : input_.units)
    most = std::max<std::int64_t>(most, std::ranges::count_if(unit.groups, &GroupShape::trainable));
  return sums_.units_under_way() * most;
}

namespace {

/// Returns the bytes of `numel` elements, rounded up to whole cache lines.
std::int64_t bytes_in_lines(DType dtype, std::int64_t numel) {
  return in_cache_lines(numel * static_cast<std::int64_t>(size_of(dtype)));
}

/// Returns the bytes of a slot for the sum of `sum_numel` elements, to which a rank contributes `numel` elements of
/// `dtype` (SlotsOnHost). In a lossy form, the slot has a message for each part of `sum_numel` elements of the
/// contribution, and the fp32 sum. Otherwise an fp32 sum is written over its contribution.
std::int64_t slot_bytes_of(WireForm form, DType dtype, std::int64_t numel, std::int64_t sum_numel) {
  if (!is_lossy(form)) {
    const std::int64_t contribution = bytes_in_lines(dtype, numel);
    return dtype == DType::kF32 ? contribution : contribution + bytes_in_lines(DType::kF32, sum_numel);
  }
  const std::int64_t parts = numel / std::max(sum_numel, std::int64_t{1});
  const auto message = static_cast<std::int64_t>(encoded_bytes(form, static_cast<std::size_t>(sum_numel)));
  return in_cache_lines(parts * message) + bytes_in_lines(DType::kF32, sum_numel);
}

}  // namespace

MemoryPlan::SlotsOnHost MemoryPlan::shard_sums_on_host() const {
  if (!input_.placement.is_queued || input_.wire.compressed_shard_part == 0) return {};
  const DType dtype = sums_.bucket_mode == BucketMode::kInPlace ? DType::kF32 : input_.wire.reduce;
  const WireForm form = input_.wire.compression.gradients;
  SlotsOnHost sums{reductions_under_way()};
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const std::int64_t numel = group.layout.numel(), sum_numel = shard_sum_numel_of(group);
    sums.slot_bytes = std::max(sums.slot_bytes, slot_bytes_of(form, dtype, numel, sum_numel));
  });
  return sums;
}

MemoryPlan::SlotsOnHost MemoryPlan::replicate_sums_on_host() const {
  if (!input_.placement.is_queued || input_.wire.compressed_replicate_part == 0) return {};
  const WireForm form = input_.wire.compression.gradients;
  const std::int64_t parts = input_.placement.gradients.replicate ? input_.placement.mesh.replicate_size : 1;
  SlotsOnHost sums{reductions_under_way()};
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const std::int64_t numel = shard_sum_numel_of(group);
    sums.slot_bytes = std::max(sums.slot_bytes, slot_bytes_of(form, DType::kF32, numel, numel / parts));
  });
  return sums;
}

MemoryPlan::SlotsOnHost MemoryPlan::gathers_on_host() const {
  const Placement& placement = input_.placement;
  const bool publishes = placement.optimizer.shard && !placement.parameters.shard;
  if (!input_.placement.is_queued || input_.wire.gathers == WireForm::kPlain || (!gathers() && !publishes)) return {};
  SlotsOnHost found;
  std::size_t most = 0;
  for (const UnitShape& unit : input_.units) {
    most = std::max(most, unit.groups.size());
    for (const GroupShape& group : unit.groups) {
      const DType dtype =
          input_.update.outer.makes_outer_steps() ? DType::kF32 : group.dtype;  // outer steps publish masters
      found.slot_bytes = std::max(found.slot_bytes, bytes_in_lines(dtype, group.layout.numel()));
    }
  }
  const auto units = std::min(input_.placement.prefetch + 1, static_cast<std::int64_t>(input_.units.size()));
  found.slots = units * static_cast<std::int64_t>(most);
  return found;
}

MemoryPlan::SlotsOnHost MemoryPlan::replica_gathers_on_host() const {
  if (!input_.placement.is_queued || input_.wire.replica_gathers == WireForm::kPlain) return {};
  SlotsOnHost found{1};
  // If the replicate axis cuts first, its gather comes last and makes the whole buffer (Publisher).
  const AxisPlacement optimizer = input_.placement.optimizer;
  const AxisPlacement shards{optimizer.shard && !optimizer.replicate_first, false};
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const std::int64_t numel = owned(shards, input_.placement.mesh, group.layout.numel()).numel;
    found.slot_bytes = std::max(found.slot_bytes, bytes_in_lines(group.dtype, numel));
  });
  return found;
}

MemoryPlan::ServedBytes MemoryPlan::served_bytes() const {
  if (!input_.update.outer.has_servers()) return {};
  const DelayCompensationConfig& delay = input_.update.outer.asynchronous.delay_compensation;
  const std::int64_t part = 4 * passes_.outer.served / input_.update.outer.asynchronous.replica_ranks;
  std::int64_t numel = 0;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const std::int64_t copies = 1 + static_cast<std::int64_t>(states_of(group).size()) + (delay.adaptive ? 1 : 0);
    numel += copies * group.layout.numel() + group.tensor_states.numel();
  });
  return {4 * numel, part * (delay.lambda != 0 ? 2 : 1), part};
}

void MemoryPlan::plan_outer() {
  const SyncConfig& outer = input_.update.outer;
  if (outer.type == SyncType::kEachStep) return;
  std::int64_t largest = 0, part = 0, all = 0;
  std::vector<std::int64_t> fragments(static_cast<std::size_t>(outer.fragments));
  for (std::size_t unit = 0; unit < input_.units.size(); ++unit) {
    for (const GroupShape& group : input_.units[unit].groups) {
      if (!group.trainable) continue;
      largest = std::max(largest, group.layout.numel());
      const std::int64_t own = optimizer_part_of(group).numel;
      part += own;
      all += group.layout.numel();
      fragments[unit % fragments.size()] += own;
    }
  }
  const bool streams = outer.type == SyncType::kStreamingDiloco;
  const bool has_common_values = outer.has_common_parameters() && !outer.is_hogwild() && !outer.has_servers();
  const bool has_mean_squares = has_common_values && outer.asynchronous.delay_compensation.adaptive;
  const std::int64_t copies = outer.has_outer_optimizer() || has_mean_squares ? 2 : has_common_values ? 1 : 0;
  // If each Hogwild rank keeps its own optimizer states, it keeps them also for the other ranks' parts.
  const bool has_all_states = outer.is_hogwild() && outer.asynchronous.states == StateSharing::kOwn;
  const std::int64_t more = has_all_states ? static_cast<std::int64_t>(input_.update.states.size()) * (all - part) : 0;
  passes_.outer = {part, copies * part + more, outer.has_common_parameters() ? 0 : largest,
                   streams ? std::ranges::max(fragments) : 0, outer.has_servers() ? all : 0};
  use_[MemoryCategory::kOptimizer] += 4 * passes_.outer.states;
  if (outer.has_common_parameters()) plan_shards(all);
  use_[MemoryCategory::kStaging] += 4 * passes_.outer.staging();
  use_[MemoryCategory::kHostRecords] += outer_sums_on_host().bytes();
}

/// Plans the memory of shards. They lie in memory of the host, also if a GPU trains. If a GPU trains, copies of its
/// `numel` values and gradients lie there too. If some ranks are backups, other ranks read the gradients, so there is
/// one more copy of the gradients.
void MemoryPlan::plan_shards(std::int64_t numel) {
  std::int64_t& shards = use_[MemoryCategory::kOptimizer];
  passes_.outer.shard_bytes = shards;
  const bool is_cut = input_.placement.mesh.world_size() > 1;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    if (input_.update.outer.has_servers()) return;
    passes_.outer.work = std::max(passes_.outer.work, work_where_it_lies(group, input_.update.matrix_work, is_cut));
  });
  use_[input_.placement.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kStaging] += 4 * passes_.outer.work;
  if (!input_.placement.is_queued) return;
  passes_.outer.copied_bytes = 4 * numel * (input_.update.outer.type == SyncType::kBackups ? 3 : 2);
  use_[MemoryCategory::kHostRecords] += shards + passes_.outer.copied_bytes;
  shards = 0;
}

MemoryPlan::SlotsOnHost MemoryPlan::outer_sums_on_host() const {
  const SyncConfig& outer = input_.update.outer;
  const CompressionConfig& compression = input_.wire.compression;
  const bool compresses = compression.gradients != WireForm::kPlain || compression.sums != WireForm::kPlain;
  if (!input_.placement.is_queued || !outer.makes_outer_steps() || input_.placement.replicas == 1 || !compresses)
    return {};
  SlotsOnHost sums;
  std::vector<std::int64_t> fragments(static_cast<std::size_t>(outer.fragments));
  for (std::size_t unit = 0; unit < input_.units.size(); ++unit) {
    for (const GroupShape& group : input_.units[unit].groups) {
      if (!group.trainable) continue;
      const std::int64_t numel = optimizer_part_of(group).numel;
      sums.slot_bytes = std::max(sums.slot_bytes, slot_bytes_of(compression.gradients, DType::kF32, numel, numel));
      ++fragments[unit % fragments.size()];
    }
  }
  const bool streams = outer.type == SyncType::kStreamingDiloco;
  sums.slots = streams ? std::ranges::max(fragments) : 1;
  return sums;
}

}  // namespace tessera
