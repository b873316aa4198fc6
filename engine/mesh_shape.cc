#include "engine/mesh_shape.h"

#include <string>

#include "runtime/border/throw.h"

namespace tessera {
namespace {

std::string shapes_that_fit(int world_size) {
  std::string text;
  for (int shard = 1; shard <= world_size; ++shard) {
    if (world_size % shard == 0) text += " " + std::to_string(world_size / shard) + "x" + std::to_string(shard);
  }
  return text;
}

}  // namespace

MeshShape mesh_shape(const Strategy& strategy, const Topology& topology) {
  const std::int64_t world = topology.world_size;
  std::int64_t replicate = strategy.mesh.replicate, shard = strategy.mesh.shard;
  const bool hybrid = strategy.strategy == ShardingStrategy::kHybridShard;
  if (replicate == 0 && shard == 0) replicate = hybrid ? topology.num_hosts() : 1;
  if (replicate == 0) replicate = shard > 0 && world % shard == 0 ? world / shard : 1;
  if (shard == 0) shard = world % replicate == 0 ? world / replicate : world;
  if (replicate * shard != world) {
    throw Error(ExitCode::kConfig,
                "/mesh: replicate " + std::to_string(replicate) + " x shard " + std::to_string(shard) + " = " +
                    std::to_string(replicate * shard) + ", but the world size is " + std::to_string(world) + " (" +
                    topology.launcher +
                    "). Shapes that fit (replicate x shard):" + shapes_that_fit(topology.world_size));
  }
  if (strategy.strategy == ShardingStrategy::kFullShard && replicate > 1) {
    throw Error(ExitCode::kConfig, "/mesh: FULL_SHARD shards over the whole world, but the mesh replicates " +
                                       std::to_string(replicate) + " times. hint: that is \"HYBRID_SHARD\"");
  }
  return {static_cast<int>(replicate), static_cast<int>(shard)};
}

int parts_for(const Strategy& strategy, const MeshPosition& mesh) {
  return parts_of(placement_of(strategy.strategy, strategy.optimizer.shard_over_world), mesh);
}

bool would_share_memory(const MeshShape& shape, const Topology& topology, TransportChoice transport) {
  const bool by_memory = transport == TransportChoice::kAuto || transport == TransportChoice::kHost;
  return by_memory && topology.local_world_size % shape.shard == 0;  // shard groups are runs of ranks
}

bool would_reduce_in_background(const Topology& topology, TransportChoice transport) {
  if (topology.world_size == 1) return false;
  return transport == TransportChoice::kGloo || (transport == TransportChoice::kAuto && topology.num_hosts() > 1);
}

}  // namespace tessera
