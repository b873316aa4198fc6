#include "workshop/app/plan/step_traffic.h"

#include <string>
#include <utility>

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
        placement_(plan.placement()),
        shard_(placement_.mesh.shard_size > 1),
        replicate_(placement_.mesh.replicate_size > 1) {}

  std::vector<StepCollective> all() {
    if (plan_.update().outer.has_common_parameters()) {
      step_with_neighbours();
      return std::move(collectives_);
    }
    gather_parameters();
    reduce_gradients();
    publish_updates();
    meet_replicas();
    send_statistics();
    return std::move(collectives_);
  }

 private:
  void add(StepCollective collective) {
    if (collective.calls > 0) collectives_.push_back(std::move(collective));
  }

  /// Adds the collectives of ranks that together form one replica of a job with parameter servers.
  void step_with_neighbours() {
    if (plan_.update().outer.asynchronous.replica_ranks == 1) return;
    StepCollective gathers{"all_gather", "replica", "parameters before use"};
    StepCollective sums{"all_reduce", "replica", "gradients, fp32"};
    for (const UnitShape& unit : plan_.units()) {
      if (unit.trainable_numel() == 0) continue;
      for (StepCollective* const each : {&gathers, &sums}) {
        ++each->calls;
        each->bytes += 4 * unit.trainable_numel();
      }
    }
    add(std::move(gathers));
    add(std::move(sums));
  }

  void gather_parameters() {
    if (!plan_.gathers() || !shard_) return;
    StepCollective gathers{"all_gather", "shard", "parameters before use"};
    StepCollective inside{"all_gather", "secondary", "parameters of the second copy"};
    for (std::size_t i = 0; i < plan_.units().size(); ++i) {
      const bool has_copy = plan_.secondary_holds(i);
      const std::int64_t times = plan_.gathers_in_step(i), over_axis = has_copy ? 1 : times;
      gathers.calls += over_axis;
      gathers.bytes += over_axis * plan_.units()[i].gathered_bytes();
      if (has_copy) gather_inside(i, times, inside);
    }
    add(std::move(inside));
    // Ranks that share a slot each read their parts into it. These ranks make only two barriers as collectives: before
    // the slot is filled, and after that.
    if (placement_.shared) gathers = {"barrier", "shard", "slots of units", 2 * gathers.calls, 0};
    add(std::move(gathers));
  }

  /// Counts the gathers of unit `i` from the second copy. The first gather fills the copy, and is made over the shard
  /// axis. If the copy is rounded, a gather of its rounded values follows, so that all uses in a step see the same
  /// values.
  void gather_inside(std::size_t i, std::int64_t times, StepCollective& inside) const {
    const std::int64_t ranks = placement_.secondary.ranks;
    bool has_codes = false;
    for (const GroupShape& group : plan_.units()[i].groups) {
      const bool is_rounded = plan_.rounds_secondary(group.dtype);
      has_codes = has_codes || is_rounded;
      inside.bytes += (is_rounded ? times : times - 1) *
                      (is_rounded ? ranks * plan_.secondary_bytes_of(group) : group.gathered_bytes());
    }
    inside.calls += has_codes ? times : times - 1;
  }

  void reduce_gradients() {
    if (!shard_ && !replicate_) return;
    if (plan_.sums().block_sums > 0) return join_blocks();
    const AxisPlacement axes = placement_.gradients;
    const bool each = plan_.sums().bucket_mode == BucketMode::kShared;
    const DType wire = plan_.sums().bucket_mode == BucketMode::kInPlace ? DType::kF32 : plan_.wire().reduce;
    const std::int64_t rounds = each ? plan_.wire().accumulation : 1;
    StepCollective over_shard{axes.shard ? "reduce_scatter" : "all_reduce", "shard", "gradients"};
    StepCollective over_replicas{axes.replicate ? "reduce_scatter" : "all_reduce", "replicate",
                                 "gradients' sums, fp32"};
    for (const UnitShape& unit : plan_.units()) {
      if (unit.trainable_numel() == 0) continue;
      over_shard.calls += rounds;
      over_shard.bytes += rounds * unit.trainable_numel() * element_bytes(wire);
      over_replicas.calls += rounds;
      over_replicas.bytes += rounds * owned({axes.shard, false}, placement_.mesh, unit.trainable_numel()).numel * 4;
    }
    if (shard_) add(std::move(over_shard));
    if (replicate_) add(std::move(over_replicas));
  }

  /// Adds the sums that ranks send under "reproducible", if a rank's microbatches do not form whole subtrees of the
  /// tree of sums.
  void join_blocks() {
    const char* const axis = !replicate_ ? "shard" : !shard_ ? "replicate" : "world";
    StepCollective sums{"all_to_all", axis,
                        "sums of subtrees, " + std::to_string(plan_.sums().block_sums) + " of a gradient"};
    StepCollective joined{"all_gather", axis, "gradients' sums, fp32"};
    for (const UnitShape& unit : plan_.units()) {
      if (unit.trainable_numel() == 0) continue;
      ++sums.calls;
      sums.bytes += plan_.sums().block_sums * unit.trainable_numel() * 4;
      ++joined.calls;
      joined.bytes += unit.trainable_numel() * 4;
    }
    add(std::move(sums));
    if (!plan_.joins_own_parts()) add(std::move(joined));
  }

  void publish_updates() {
    StepCollective over_replicas{"all_gather", "replicate", "updated parameters"};
    StepCollective over_shard{"all_gather", "shard", "updated parameters"};
    for (const UnitShape& unit : plan_.units()) {
      if (unit.trainable_numel() == 0) continue;
      const std::int64_t bytes = trainable_bytes(unit);
      if (placement_.optimizer.replicate && replicate_) {
        ++over_replicas.calls;
        const bool of_a_shard = placement_.optimizer.shard && !placement_.optimizer.replicate_first;
        over_replicas.bytes += of_a_shard ? bytes / placement_.mesh.shard_size : bytes;
      }
      if (placement_.optimizer.shard && !placement_.parameters.shard && shard_) {
        ++over_shard.calls;
        over_shard.bytes += placement_.optimizer.replicate_first ? bytes / placement_.mesh.replicate_size : bytes;
      }
    }
    add(std::move(over_replicas));
    add(std::move(over_shard));
    if (placement_.shared) add({"barrier", "shard", "updated parameters", 1, 0});
  }

  /// Adds the exchange of microbatches' running statistics ("broadcast_buffers" microbatch_order).
  void send_statistics() {
    const std::int64_t ranks = placement_.mesh.world_size(), bytes = ranks * plan_.statistics_message_bytes();
    if (bytes > 0 && ranks > 1) add({"all_gather", "world", "running statistics of microbatches", 1, bytes});
  }

  /// Adds the collectives of outer steps.
  void meet_replicas() {
    const SyncConfig& outer = plan_.update().outer;
    if (!outer.makes_outer_steps() || placement_.replicas == 1) return;
    const char* const what = outer.has_outer_optimizer() ? "outer gradients" : "masters";
    StepCollective over_replicas{"all_reduce", "replicate", what};
    StepCollective over_shard{"all_gather", "shard", "masters after outer steps"};
    over_replicas.every = over_shard.every = outer.every;
    for (const UnitShape& unit : plan_.units()) {
      for (const GroupShape& group : unit.groups) {
        if (!group.trainable) continue;
        ++over_replicas.calls;
        over_replicas.bytes += 4 * owned(placement_.optimizer, placement_.mesh, group.layout.numel()).numel;
        if (!placement_.optimizer.shard || placement_.parameters.shard || !shard_) continue;
        ++over_shard.calls;
        over_shard.bytes += 4 * group.layout.numel();
      }
    }
    add(std::move(over_replicas));
    add(std::move(over_shard));
  }

  const MemoryPlan& plan_;
  const PlannedPlacement& placement_;
  const bool shard_, replicate_;
  std::vector<StepCollective> collectives_;
};

}  // namespace

std::vector<StepCollective> collectives_of_step(const MemoryPlan& plan) { return StepTraffic(plan).all(); }

}  // namespace tessera::app
