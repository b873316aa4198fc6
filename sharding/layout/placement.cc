#include "sharding/layout/placement.h"

namespace tessera {

Placement placement_of(ShardingStrategy strategy, bool optimizer_over_world) {
  constexpr AxisPlacement kReplicated{};
  constexpr AxisPlacement kSharded{.shard = true};
  constexpr AxisPlacement kWorld{.shard = true, .replicate = true};
  switch (strategy) {
    case ShardingStrategy::kNoShard:
      return {kReplicated, kReplicated, kReplicated};
    case ShardingStrategy::kShardOptimizer:
      return {kReplicated, kReplicated, kSharded};
    case ShardingStrategy::kShardGradients:
      return {kReplicated, kSharded, kSharded};
    case ShardingStrategy::kShardGradOp:
      return {kSharded, kSharded, kSharded, /*keep_gathered=*/true};
    case ShardingStrategy::kFullShard:
      return {kSharded, kSharded, kSharded};
    case ShardingStrategy::kHybridShard:
      return optimizer_over_world ? Placement{kSharded, kWorld, kWorld} : Placement{kSharded, kSharded, kSharded};
  }
  return {};
}

Placement share_parameters(Placement placement) {
  if (!placement.optimizer.shard) return placement;
  placement.parameters = {.shard = true};
  placement.keep_gathered = false;
  placement.shared = true;
  return placement;
}

int parts_of(const Placement& placement, const MeshPosition& mesh) {
  const bool world = placement.gradients.replicate || placement.optimizer.replicate;
  return mesh.shard_size * (world ? mesh.replicate_size : 1);
}

Extent owned(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel) {
  Extent part{0, numel};
  if (axes.shard) {
    part.numel /= mesh.shard_size;
    part.offset += mesh.shard_index * part.numel;
  }
  if (axes.replicate) {
    part.numel /= mesh.replicate_size;
    part.offset += mesh.replicate_index * part.numel;
  }
  return part;
}

}  // namespace tessera
