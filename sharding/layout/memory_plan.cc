#include "sharding/layout/memory_plan.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <span>

#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"

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
  }
  return "?";
}

std::int64_t MemoryUse::total() const { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }

std::int64_t UnitShape::gathered_bytes() const {
  std::int64_t bytes = 0;
  for (const GroupShape& group : groups) bytes += group.gathered_bytes();
  return bytes;
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
  plan_parameters();
  plan_gradients();
  plan_optimizer();
}

void MemoryPlan::plan_parameters() {
  const bool gathers = input_.placement.parameters.shard && input_.mesh.shard_size > 1;
  for (const UnitShape& unit : input_.units) {
    const std::int64_t bytes = unit.gathered_bytes();
    const bool shard_only = gathers && !input_.placement.keep_gathered;
    use_[MemoryCategory::kParameters] += shard_only ? bytes / input_.mesh.shard_size : bytes;
  }
  if (!gathers || input_.placement.keep_gathered || input_.placement.shared) return;
  for (std::size_t i = 1; i < input_.units.size(); ++i) {
    slot_bytes_ = std::max(slot_bytes_, input_.units[i].gathered_bytes());
  }
  const auto others = static_cast<std::int64_t>(input_.units.size()) - 1;
  shared_slots_ = std::min(input_.prefetch + 1, others);
  use_[MemoryCategory::kSlots] = input_.units[0].gathered_bytes() + shared_slots_ * slot_bytes_;
}

std::int64_t MemoryPlan::bucket_bytes_of(const UnitShape& unit) const {
  const DType dtype = bucket_mode_ == BucketMode::kShared ? input_.reduce : DType::kF32;
  return unit.trainable_numel() * static_cast<std::int64_t>(size_of(dtype));
}

void MemoryPlan::plan_gradients() {
  const AxisPlacement axes = input_.placement.gradients;
  const int world = input_.mesh.world_size();
  const bool once = input_.accumulation == 1 || input_.sync == GradientSync::kLastMicrobatch;
  const bool replicated =
      !(axes.shard && input_.mesh.shard_size > 1) && !(axes.replicate && input_.mesh.replicate_size > 1);
  if (world == 1 || (replicated && input_.reduce == DType::kF32 && once)) {
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
    use_[MemoryCategory::kGradients] += sum_bytes_of(unit);
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

void MemoryPlan::plan_lag() {
  if (!input_.is_queued) {
    reduction_lag_ = affordable_lag();
    end_lag_ = 2 * reduction_lag_;
  } else if (input_.mesh.world_size() > 1) {
    reduction_lag_ = input_.mesh.replicate_size > 1 ? 1 : 0;
    end_lag_ = reduction_lag_ + 1;
  }
}

// The sum over a replicate axis follows that over the shard axis at once, so there a rank waits.
std::int64_t MemoryPlan::affordable_lag() const {
  constexpr std::int64_t kMostBought = 3, kRoom = 8 << 20;
  if (input_.mesh.world_size() == 1 || input_.mesh.replicate_size > 1) return 0;
  std::int64_t groups = 1;
  for (const UnitShape& unit : input_.units) {
    const auto trains = [](const GroupShape& group) { return group.trainable; };
    groups = std::max<std::int64_t>(groups, std::count_if(unit.groups.begin(), unit.groups.end(), trains));
  }
  if (input_.updates_in_backward) ++groups;  // what ranks tell each other of a unit is a reduction too
  const std::int64_t most = (std::max(kMostUnderWay / groups, std::int64_t{1}) - 1) / 2;
  const std::int64_t bucket = bucket_mode_ == BucketMode::kShared ? bucket_bytes_ : 0;
  const std::int64_t sum = input_.updates_in_backward ? sum_bytes_ : 0;
  const std::int64_t cost = 2 * (bucket + sum + scratch_numel_ * 4);
  return cost == 0 ? most : std::min({most, kMostBought, kRoom / cost});
}

StatePiece state_piece(StateDType dtype, std::int64_t numel) {
  constexpr std::int64_t kCacheLine = 64;
  const auto whole_lines = [](std::int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; };
  const StateBytes bytes = state_bytes(dtype, numel);
  return {whole_lines(bytes.data), whole_lines(bytes.scales)};
}

void MemoryPlan::plan_optimizer() {
  std::vector<std::int64_t> record_bytes;  // in the order of the update
  for (const UnitShape& unit : input_.units) {
    for (const GroupShape& group : unit.groups) {
      if (!group.trainable) continue;
      const RecordLayout records = records_of(group);
      use_[MemoryCategory::kMasters] += master_bytes(input_.master, group.dtype, records.masters_in_memory());
      use_[MemoryCategory::kOptimizer] +=
          state_piece(input_.state_dtype, records.states_in_memory()).bytes() * input_.optimizer_states;
      for (std::int64_t chunk = records.first_record(); chunk < records.chunks(); ++chunk) {
        record_bytes.push_back(records.record(chunk).bytes);
      }
    }
  }
  if (!record_bytes.empty()) plan_records(record_bytes);
}

RecordLayout MemoryPlan::records_of(const GroupShape& group) const {
  const auto share = [](const OffloadedState& state) { return state.tier == Tier::kNvme ? state.fraction : 0.0; };
  TieredState state;
  state.master_bytes = master_bytes(input_.master, group.dtype, 1);
  state.states = input_.optimizer_states;
  state.state_dtype = input_.state_dtype;
  state.masters_below = share(input_.offload.masters);
  state.states_below = share(input_.offload.moments);
  state.record_bytes = input_.offload.record_bytes;
  return {owned(input_.placement.optimizer, input_.mesh, group.layout.numel()).numel, state};
}

void MemoryPlan::plan_records(const std::vector<std::int64_t>& bytes) {
  records_ = static_cast<std::int64_t>(bytes.size());
  record_bytes_ = *std::max_element(bytes.begin(), bytes.end());
  cached_records_ = std::min(input_.offload.cache_bytes / record_bytes_, records_);
  const std::int64_t others = records_ - cached_records_;
  record_slots_ = std::min(2 * input_.offload.queue_depth + 1, others);
  use_[MemoryCategory::kRecords] = (cached_records_ + record_slots_) * record_bytes_;
  // A step reads all others but those that the slots hold from the last one, and writes all others.
  const auto moving = std::span(bytes).subspan(static_cast<std::size_t>(cached_records_));
  const auto sum = [](std::span<const std::int64_t> some) {
    return std::accumulate(some.begin(), some.end(), std::int64_t{0});
  };
  const auto slots = static_cast<std::size_t>(record_slots_);
  disk_.bytes = sum(moving);
  // Updates in backward go the same way in every step, so they find in the slots all records or none.
  const bool finds_none = input_.updates_in_backward && record_slots_ < others;
  disk_.read_in_two_steps = 2 * disk_.bytes - (finds_none ? 0 : sum(moving.first(slots)) + sum(moving.last(slots)));
  disk_.written_in_two_steps = 2 * disk_.bytes;
}

std::string MemoryPlan::to_table() const {
  static const char* const kWhat[kMemoryCategories] = {"this rank's part of the parameters",
                                                       "units gathered for compute",
                                                       "reduced gradients, fp32",
                                                       "gradients on their way to the reduction",
                                                       "what fp32 masters have beyond the parameters",
                                                       "optimizer state",
                                                       "scratch",
                                                       "records of what lies on disk, used, on their way, or cached"};
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
  std::string text = table.to_string();
  if (records_ > 0) {
    text += "on disk: " + format_bytes(disk_.bytes) + " (" + std::to_string(disk_.bytes) + " bytes) in " +
            std::to_string(records_) + " records of at most " + format_bytes(record_bytes_) + "; a step reads " +
            format_bytes(disk_.read_in_two_steps / 2) + " and writes " + format_bytes(disk_.written_in_two_steps / 2) +
            "\n";
  }
  return text;
}

}  // namespace tessera
