#include "planner/script/update_script.h"

#include "planner/script/form_cost.h"
#include "sharding/layout/placement.h"

namespace tessera {

UpdateScript::UpdateScript(const MemoryPlan& plan, const StepProfile& profile, bool publishes_behind,
                           ScriptWriter& writer)
    : plan_(plan),
      profile_(profile),
      writer_(writer),
      publishes_behind_(publishes_behind),
      behind_(plan.units().size()) {
  for_each_trainable(plan.units(), [&](const GroupShape& group) { groups_.push_back(&group); });
}

/// Returns the approximate number of bytes in a rank's message of an agreement (engine/step/agree/step_agreement.cc):
/// 72 bytes of numbers, and a flag and a sum of squares for each trainable parameter.
std::int64_t UpdateScript::agreement_bytes() const {
  constexpr std::int64_t kHeader = 72, kEach = 9;
  std::int64_t parameters = 0;
  for (const UnitShape& unit : plan_.units()) parameters += unit.trainable_parameters();
  return kHeader + kEach * parameters;
}

/// Returns the cost of a call over two axes. The call first sends messages among the ranks that have the same position
/// in their shard groups. Then it sends all messages inside each shard group.
CallCost UpdateScript::world_cost(std::int64_t message_bytes) const {
  const std::int64_t shards = writer_.ranks(Axis::kShard), replicas = writer_.ranks(Axis::kReplicate);
  const Links &inside = writer_.links(Axis::kShard), &across = writer_.links(Axis::kReplicate);
  return across.cost(across.small, static_cast<int>(replicas), (replicas - 1) * message_bytes) +
         inside.cost(inside.small, static_cast<int>(shards), replicas * (shards - 1) * message_bytes);
}

void UpdateScript::agree() {
  if (plan_.placement().mesh.world_size() == 1) return;
  writer_.call(Channel::kWorld, world_cost(agreement_bytes()), Spending::kAgreement, "agree");
}

/// A rank's message (engine/step/rules/layer_norms.cc) has about two sums of squares for each trainable parameter.
void UpdateScript::agree_on_norms(int unit) {
  constexpr std::int64_t kEach = 16;
  if (plan_.placement().mesh.world_size() == 1) return;
  const std::int64_t bytes = kEach * plan_.units()[static_cast<std::size_t>(unit)].trainable_parameters();
  writer_.call(Channel::kWorld, world_cost(bytes), Spending::kAgreement, "layer norms", unit);
}

void UpdateScript::update(const Visit& visit) {
  const PlannedPlacement& placement = plan_.placement();
  const GroupShape& group = *groups_[static_cast<std::size_t>(visit.group)];
  const auto part = static_cast<double>(owned(placement.optimizer, placement.mesh, group.layout.numel()).numel);
  const auto all = static_cast<double>(profile_.updated_elements);
  const double seconds = profile_.update_seconds > 0 ? profile_.update_seconds * (part / all) : 0.0;
  writer_.work(Spending::kUpdate, seconds, "update", visit.unit);
  publish(group, visit.unit);
}

/// The first all-gather is over the axis whose parts lie inside the parts of the other axis: the replicate axis, or
/// with replicate_first the shard axis.
void UpdateScript::publish(const GroupShape& group, int unit) {
  const PlannedPlacement& placement = plan_.placement();
  const int shards = writer_.ranks(Axis::kShard), replicas = writer_.ranks(Axis::kReplicate);
  const std::int64_t own = owned(placement.optimizer, placement.mesh, group.layout.numel()).numel;
  if (placement.optimizer.replicate_first && shards > 1) {
    const CallCost cost = all_gather_in(plan_.wire().gathers, group.dtype, own, writer_.links(Axis::kShard), shards);
    writer_.call(Channel::kGather, cost, Spending::kPublish, "publish", unit);
  }
  if (placement.optimizer.replicate && replicas > 1) {
    const std::int64_t numel = placement.optimizer.replicate_first ? own * shards : own;
    const CallCost cost =
        all_gather_in(plan_.wire().replica_gathers, group.dtype, numel, writer_.links(Axis::kReplicate), replicas);
    writer_.call(Channel::kReplicate, cost, Spending::kPublish, "publish", unit);
  }
  if (placement.optimizer.replicate_first) return;
  if (!placement.optimizer.shard || placement.parameters.shard || shards == 1) return;
  const Links& links = writer_.links(Axis::kShard);
  const CallCost cost = all_gather_in(plan_.wire().gathers, group.dtype, group.layout.numel() / shards, links, shards);
  const int call = writer_.post(Channel::kGather, cost, "publish", unit);
  if (publishes_behind_) return behind_[static_cast<std::size_t>(unit)].push_back(call);
  if (!links.gathers_in_background) return writer_.wait(call, Spending::kPublish);
  under_way_.push_back(call);
  if (static_cast<std::int64_t>(under_way_.size()) <= MemoryPlan::kMostUnderWay) return;
  writer_.wait(under_way_.front(), Spending::kPublish);
  under_way_.pop_front();
}

void UpdateScript::use(int unit) {
  std::vector<int>& calls = behind_[static_cast<std::size_t>(unit)];
  for (const int call : calls) writer_.wait(call, Spending::kPublish);
  calls.clear();
}

void UpdateScript::wait_for_published() {
  for (std::size_t unit = 0; unit < behind_.size(); ++unit) use(static_cast<int>(unit));
  for (const int call : under_way_) writer_.wait(call, Spending::kPublish);
  under_way_.clear();
}

void UpdateScript::meet() {
  const int shards = writer_.ranks(Axis::kShard);
  if (shards == 1) return;
  const Links& links = writer_.links(Axis::kShard);
  writer_.call(Channel::kGather, links.cost(links.small, shards, 0), Spending::kPublish, "barrier");
}

}  // namespace tessera
