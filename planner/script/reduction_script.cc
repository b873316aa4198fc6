#include "planner/script/reduction_script.h"

#include <algorithm>

#include "planner/script/reduction_cost.h"

namespace tessera {

// --- One sum ---

ReductionScript::Way ReductionScript::way_of(Axis axis) const {
  const Links& links = writer_.links(axis);
  if (links.reduces_in_background) return Way::kBackground;
  return links.gathers_in_background ? Way::kInCall : Way::kSharedMemory;
}

ReductionScript::Sum ReductionScript::start(Axis axis, const CallCost& cost, int unit) {
  const bool is_shard = axis == Axis::kShard;
  Sum sum{axis, cost, unit};
  if (way_of(axis) == Way::kSharedMemory) {
    sum.started = writer_.post(is_shard ? Channel::kShardMeeting : Channel::kReplicateMeeting, {}, "started", unit);
    return sum;
  }
  sum.started = writer_.post(is_shard ? Channel::kReduce : Channel::kReplicate, cost, "reduce", unit);
  if (way_of(axis) == Way::kInCall) writer_.wait(sum.started, Spending::kReduction);
  return sum;
}

void ReductionScript::do_share(Sum& sum) {
  if (way_of(sum.axis) != Way::kSharedMemory || sum.finished != ScriptWriter::kNoCall) return;
  writer_.wait(sum.started, Spending::kReduction);
  writer_.sum(sum.axis, sum.cost, sum.unit);
  sum.finished = writer_.post(sum.axis == Axis::kShard ? Channel::kShardMeeting : Channel::kReplicateMeeting, {},
                              "finished", sum.unit);
}

void ReductionScript::wait(Sum& sum) {
  do_share(sum);
  if (way_of(sum.axis) == Way::kInCall) return;
  writer_.wait(way_of(sum.axis) == Way::kSharedMemory ? sum.finished : sum.started, Spending::kReduction);
}

// --- Units, in the order of Reducer ---

bool ReductionScript::accumulates() const {
  if (plan_.update().in_backward) return false;
  if (plan_.sums().block_sums > 0) return true;
  const BucketMode mode = plan_.sums().bucket_mode;
  return plan_.placement().mesh.world_size() == 1 || mode == BucketMode::kAccumulator ||
         (mode == BucketMode::kInPlace && plan_.wire().accumulation > 1);
}

bool ReductionScript::replicas_follow() const {
  const PlannedPlacement& placement = plan_.placement();
  return placement.mesh.replicate_size > 1 && (placement.is_queued || plan_.sums().end_lag > 0);
}

void ReductionScript::complete(int unit) {
  if (!accumulates()) reduce(unit);
}

void ReductionScript::finish(bool is_last_round) {
  const bool reduces_all = !accumulates() || is_last_round;
  for (auto unit = static_cast<int>(is_reduced_.size()) - 1; reduces_all && unit >= 0; --unit) {
    if (!is_reduced_[static_cast<std::size_t>(unit)]) reduce(unit);
  }
  follow(0, 0);
  std::ranges::fill(is_reduced_, 0);
}

void ReductionScript::reduce(int unit) {
  is_reduced_[static_cast<std::size_t>(unit)] = 1;
  if (plan_.units()[static_cast<std::size_t>(unit)].trainable_numel() == 0) return;
  start_unit(unit);
  follow(plan_.sums().reduction_lag, plan_.sums().end_lag);
}

void ReductionScript::start_unit(int unit) {
  UnitSums& sums = sums_.emplace_back();
  sums.unit = unit;
  const bool is_sent = writer_.ranks(Axis::kShard) > 1;
  for (const GroupShape& group : plan_.units()[static_cast<std::size_t>(unit)].groups) {
    if (!group.trainable) continue;
    GroupSums& of_group = sums.groups.emplace_back(GroupSums{&group, {}, {}});
    const Links& links = writer_.links(Axis::kShard);
    if (is_sent) of_group.shard = start(Axis::kShard, shard_reduction_cost(plan_, group, links), unit);
  }
  if (!plan_.update().in_backward || !is_sent) return;
  const CallCost notes = notes_cost(plan_, writer_.ranks(Axis::kShard), writer_.links(Axis::kShard));
  sums.notes = start(Axis::kShard, notes, unit);
}

void ReductionScript::follow(std::int64_t lag, std::int64_t end_lag) {
  const auto started = static_cast<std::int64_t>(sums_.size());
  for (; advanced_ < started - lag; ++advanced_) advance(sums_[static_cast<std::size_t>(advanced_)]);
  for (; over_ < started - end_lag; ++over_) end(sums_[static_cast<std::size_t>(over_)]);
}

void ReductionScript::advance(UnitSums& unit) {
  for (GroupSums& sums : unit.groups) {
    if (sums.shard) do_share(*sums.shard);
    if (!replicas_follow()) continue;
    if (sums.shard) wait(*sums.shard);
    sums.replicate = start_replicas(sums, unit.unit);
  }
  if (unit.notes) do_share(*unit.notes);
}

void ReductionScript::end(UnitSums& unit) {
  for (GroupSums& sums : unit.groups) {
    if (sums.shard && !replicas_follow()) wait(*sums.shard);
    if (writer_.ranks(Axis::kReplicate) == 1) continue;
    if (!sums.replicate) sums.replicate = start_replicas(sums, unit.unit);
    wait(*sums.replicate);
  }
  if (!plan_.update().in_backward) return;
  if (unit.notes) wait(*unit.notes);
  if (const int replicas = writer_.ranks(Axis::kReplicate); replicas > 1) {
    Sum notes = start(Axis::kReplicate, notes_cost(plan_, replicas, writer_.links(Axis::kReplicate)), unit.unit);
    wait(notes);
  }
  on_summed_(unit.unit);
}

ReductionScript::Sum ReductionScript::start_replicas(const GroupSums& sums, int unit) {
  return start(Axis::kReplicate, replicate_reduction_cost(plan_, *sums.group, writer_.links(Axis::kReplicate)), unit);
}

}  // namespace tessera
