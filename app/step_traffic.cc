#include "app/step_traffic.h"

#include <algorithm>

namespace tessera::app {
namespace {

std::int64_t element_bytes(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

std::int64_t trainable_bytes(const UnitShape& unit) {
  std::int64_t bytes = 0;
  for (const GroupShape& group : unit.groups) bytes += group.trainable ? group.gathered_bytes() : 0;
  return bytes;
}

class StepTraffic {
 public:
  explicit StepTraffic(const MemoryPlan& plan)
      : plan_(plan),
        input_(plan.input()),
        shard_(input_.mesh.shard_size > 1),
        replicate_(input_.mesh.replicate_size > 1) {}

  std::vector<StepCollective> all() {
    gather_parameters();
    reduce_gradients();
    publish_updates();
    return std::move(collectives_);
  }

 private:
  void add(StepCollective collective) {
    if (collective.calls > 0) collectives_.push_back(std::move(collective));
  }

  /// The root unit has a slot of its own and is gathered once. The others take turns in `slots`: what a direction left
  /// in them, the next one (which begins there) finds.
  void gather_parameters() {
    if (!input_.placement.parameters.shard || input_.placement.shared || !shard_) return;
    StepCollective gathers{"all_gather", "shard", "parameters before use"};
    const auto count = static_cast<std::int64_t>(input_.units.size());
    const bool kept = input_.placement.keep_gathered;
    const std::int64_t slots = kept ? count : plan_.shared_slots();
    const std::int64_t directions = 2 * input_.accumulation;
    for (std::int64_t i = 0; i < count; ++i) {
      // Forward leaves the last `slots` units gathered, backward the first.
      std::int64_t times = 1;
      if (i > 0 && !kept && count - 1 > slots) {
        const bool left_by_forward = i >= count - slots, left_by_backward = i <= slots;
        times += (directions / 2) * (left_by_forward ? 0 : 1) + (directions / 2 - 1) * (left_by_backward ? 0 : 1);
      }
      gathers.calls += times;
      gathers.bytes += times * input_.units[i].gathered_bytes();
    }
    add(std::move(gathers));
  }

  void reduce_gradients() {
    if (!shard_ && !replicate_) return;
    const AxisPlacement axes = input_.placement.gradients;
    const bool each = plan_.bucket_mode() == BucketMode::kShared;
    const DType wire = plan_.bucket_mode() == BucketMode::kInPlace ? DType::kF32 : input_.reduce;
    const std::int64_t rounds = each ? input_.accumulation : 1;
    StepCollective over_shard{axes.shard ? "reduce_scatter" : "all_reduce", "shard", "gradients"};
    StepCollective over_replicas{axes.replicate ? "reduce_scatter" : "all_reduce", "replicate",
                                 "gradients' sums, fp32"};
    for (const UnitShape& unit : input_.units) {
      if (unit.trainable_numel() == 0) continue;
      over_shard.calls += rounds;
      over_shard.bytes += rounds * unit.trainable_numel() * element_bytes(wire);
      over_replicas.calls += rounds;
      over_replicas.bytes += rounds * owned({axes.shard, false}, input_.mesh, unit.trainable_numel()).numel * 4;
    }
    if (shard_) add(std::move(over_shard));
    if (replicate_) add(std::move(over_replicas));
  }

  void publish_updates() {
    const Placement& placement = input_.placement;
    StepCollective over_replicas{"all_gather", "replicate", "updated parameters"};
    StepCollective over_shard{"all_gather", "shard", "updated parameters"};
    for (const UnitShape& unit : input_.units) {
      if (unit.trainable_numel() == 0) continue;
      const std::int64_t bytes = trainable_bytes(unit);
      if (placement.optimizer.replicate && replicate_) {
        ++over_replicas.calls;
        over_replicas.bytes += placement.optimizer.shard ? bytes / input_.mesh.shard_size : bytes;
      }
      if (placement.optimizer.shard && !placement.parameters.shard && shard_) {
        ++over_shard.calls;
        over_shard.bytes += bytes;
      }
    }
    add(std::move(over_replicas));
    add(std::move(over_shard));
    if (placement.shared) add({"barrier", "shard", "updated parameters", 1, 0});
  }

  const MemoryPlan& plan_;
  const PlanInput& input_;
  const bool shard_, replicate_;
  std::vector<StepCollective> collectives_;
};

}  // namespace

std::vector<StepCollective> collectives_of_step(const MemoryPlan& plan) { return StepTraffic(plan).all(); }

}  // namespace tessera::app
