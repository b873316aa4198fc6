#include "engine/job/plan_scene.h"

#include <algorithm>
#include <map>

#include "runtime/config/transport_rows.h"

namespace tessera {
namespace {

/// Returns the Collectives::compressed_part of a group with the `count` ranks `first`, `first` + `stride`, and so on,
/// as composed_group_factory would make it. Compressed sums of GPUs always go over Gloo, whatever other calls use.
int compressed_part(int first, int count, int stride, const Topology& topology, TransportChoice transport) {
  if (count == 1) return 0;
  if (has(transport, transport_traits::kSharedMemory)) return 0;
  if (transport != TransportChoice::kAuto) return 1;
  std::map<int, int> ranks_of_host;
  for (int i = 0; i < count; ++i) ++ranks_of_host[topology.host_of(first + i * stride)];
  if (ranks_of_host.size() == 1) return 0;
  const int ranks = ranks_of_host.begin()->second;
  const bool is_even = std::ranges::all_of(ranks_of_host, [&](const auto& host) { return host.second == ranks; });
  return is_even ? ranks : 1;
}

/// Returns whether gradients will be summed over a network on some axis (Collectives::reduces_in_background).
bool would_reduce_in_background(const Topology& topology, TransportChoice transport) {
  if (topology.world_size == 1) return false;
  return has(transport, transport_traits::kBackground) ||
         (transport == TransportChoice::kAuto && topology.num_hosts() > 1);
}

}  // namespace

GroupAbilities planned_abilities(const Strategy& strategy, const MeshShape& shape, const Topology& topology) {
  const TransportChoice transport = strategy.comm.transport;
  GroupAbilities abilities{would_share_memory(shape, topology, transport), has(transport, transport_traits::kOnGpu)};
  // Ranks that train common parameters do not sum gradients (ReplicaSync::axes).
  abilities.reduces_in_background =
      !strategy.sync.has_common_parameters() && would_reduce_in_background(topology, transport);
  const bool is_on_a_host = topology.hosts_hold_whole_groups_of(shape.shard);
  abilities.shard_reduces_in_background = shape.shard > 1 && abilities.reduces_in_background &&
                                          (has(transport, transport_traits::kBackground) || !is_on_a_host);
  const int place = topology.rank % shape.shard;
  abilities.shard_compressed_part = compressed_part(topology.rank - place, shape.shard, 1, topology, transport);
  abilities.replicate_compressed_part = compressed_part(place, shape.replicate, shape.shard, topology, transport);
  return abilities;
}

PlanScene plan_scene(const SyncConfig& sync, const MeshPosition& position, const Topology& topology,
                     const GroupAbilities& abilities) {
  PlanScene scene{planned_position(sync, position), abilities.shares_memory, abilities.is_queued};
  // Replicas that train apart make no sums of gradients over the replicate axis.
  const bool is_apart = sync.type != SyncType::kEachStep;
  scene.reduces_in_background = is_apart ? abilities.shard_reduces_in_background : abilities.reduces_in_background;
  scene.shard_compressed_part = abilities.shard_compressed_part;
  if (!is_apart) scene.replicate_compressed_part = abilities.replicate_compressed_part;
  scene.sync = sync;
  scene.replicas = position.replicate_size;
  scene.ranks_of_host = topology.has_equal_hosts() ? topology.local_world_size : 0;
  return scene;
}

}  // namespace tessera
