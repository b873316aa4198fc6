#include "planner/outer_cost.h"

#include <algorithm>

#include "planner/script/form_cost.h"
#include "sharding/layout/placement.h"

namespace tessera {
namespace {

void add(PredictedWire& wire, const CallCost& cost) {
  wire.busy_s += cost.seconds();
  ++wire.calls;
  wire.sent_bytes += cost.sent_bytes;
  wire.latency_s += cost.latency_s;
  wire.transfer_s += cost.transfer_s;
}

/// Returns the mean traffic of one step, if `every` steps together have the traffic `wire`.
PredictedWire mean_of(const PredictedWire& wire, std::int64_t every) {
  const auto steps = static_cast<double>(every);
  const auto rounded_up = [&](std::int64_t count) { return (count + every - 1) / every; };
  return {wire.busy_s / steps, rounded_up(wire.calls), rounded_up(wire.sent_bytes), wire.latency_s / steps,
          wire.transfer_s / steps};
}

/// Returns whether sums over the replicas can be made while replicas compute.
bool is_beside_compute(const MemoryPlan& plan, const Links& links) {
  return links.reduces_in_background || plan.placement().is_queued;
}

/// Returns the cost of an all-reduce of `numel` fp32 elements over the replicas.
CallCost sum_cost(const MemoryPlan& plan, std::int64_t numel, const Links& links) {
  const CompressionConfig& compression = plan.wire().compression;
  const int replicas = plan.placement().replicas;
  // Compressed sums of GPUs' values are made by the hosts over a network, whatever connection the GPUs have.
  const bool compresses = plan.update().outer.has_outer_optimizer() && is_beside_compute(plan, links);
  const std::int64_t others = replicas - 1, part = (numel + others) / replicas;
  const WireForm gradients = compresses ? compression.gradients : WireForm::kPlain;
  const CallCost sums =
      all_gather_in(compresses ? compression.sums : WireForm::kPlain, DType::kF32, part, links, replicas);
  const std::int64_t bytes = others * bytes_on_wire(gradients, DType::kF32, part) + sums.sent_bytes;
  return with_coding(links.cost(links.all_reduce, replicas, bytes),
                     others * coding_seconds(links.coding, gradients, DType::kF32, part) + sums.coding_s);
}

}  // namespace

OuterCost outer_cost(const MemoryPlan& plan, double step_s, const MeshLinks& links) {
  const PlannedPlacement& placement = plan.placement();
  const SyncConfig& outer = plan.update().outer;
  if (!outer.makes_outer_steps() || placement.replicas == 1) return {};
  const bool streams = outer.type == SyncType::kStreamingDiloco;
  const AxisPlacement optimizer = placement.optimizer;
  const bool gathers = optimizer.shard && !placement.parameters.shard && placement.mesh.shard_size > 1;
  const bool is_hidden = streams && outer.delay > 0 && is_beside_compute(plan, links.replicate);
  OuterCost all;
  all.fragments.resize(static_cast<std::size_t>(streams ? outer.fragments : 1));
  all.delay = is_hidden ? outer.delay : 0;
  for (std::size_t unit = 0; unit < plan.units().size(); ++unit) {
    FragmentCosts& fragment = all.fragments[unit % all.fragments.size()];
    for (const GroupShape& group : plan.units()[unit].groups) {
      if (!group.trainable) continue;
      const std::int64_t part = owned(optimizer, placement.mesh, group.layout.numel()).numel;
      const CallCost sum = sum_cost(plan, part, links.replicate);
      add(all.replicate, sum);
      fragment.sum_s += is_hidden ? sum.busy_seconds() : sum.seconds();
      if (!gathers) continue;
      const CallCost gather =
          all_gather_in(plan.wire().gathers, DType::kF32, part, links.shard, placement.mesh.shard_size);
      add(all.shard, gather);
      fragment.publish_s += gather.seconds();
    }
  }
  const double hidden_s = static_cast<double>(all.delay) * step_s;
  for (const FragmentCosts& each : all.fragments)
    all.exposed_s += std::max(0.0, each.sum_s - hidden_s) + each.publish_s;
  all.exposed_s /= static_cast<double>(outer.every);
  all.shard = mean_of(all.shard, outer.every);
  all.replicate = mean_of(all.replicate, outer.every);
  return all;
}

}  // namespace tessera
