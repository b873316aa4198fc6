#include "engine/job/mesh_shape.h"

#include <numeric>
#include <string>

#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/config/transport_rows.h"

namespace tessera {
namespace {

std::string shapes_that_fit(int world_size) {
  std::string text;
  for (int shard = 1; shard <= world_size; ++shard) {
    if (world_size % shard == 0) text += " " + std::to_string(world_size / shard) + "x" + std::to_string(shard);
  }
  return text;
}

/// Returns the text of a remedy: the largest size of a shard group that divides the number of ranks on every host. If
/// that is 1, the remedy is to start equally many ranks on every host.
std::string mesh_that_fits(const Topology& topology) {
  int shard = topology.world_size;
  for (const int ranks : topology.ranks_of_hosts) shard = std::gcd(shard, ranks);
  if (shard == 1) return ", or start as many ranks on every host";
  return ", or give \"mesh\": {\"shard\": " + std::to_string(shard) + "}, which divides the ranks of every host";
}

/// Throws if hosts have different numbers of ranks. A mesh that follows hosts makes a replica of each host, so hosts
/// must be equal.
void expect_equal_hosts(const Strategy& strategy, const Topology& topology) {
  if (topology.has_equal_hosts()) return;
  const bool is_by_axes = strategy.placement.is_given();
  throw Error(ExitCode::kConfig, std::string(is_by_axes ? "/placement: the mesh" : "/strategy: HYBRID_SHARD") +
                                     " makes a replica of each host, so hosts need the same number of ranks, and here "
                                     "they have " +
                                     joined_numbers(topology.ranks_of_hosts) +
                                     ". [T0978] hint: take \"FULL_SHARD\" without \"mesh\"" + mesh_that_fits(topology));
}

/// Throws if hosts have different numbers of ranks, unless each shard group is the whole world or lies on one host.
/// Groups of other shapes would share memory on some hosts and not on others.
void expect_groups_on_hosts(int shard, const Topology& topology) {
  if (topology.has_equal_hosts() || shard == topology.world_size || topology.hosts_hold_whole_groups_of(shard)) return;
  throw Error(ExitCode::kConfig,
              "/mesh/shard: groups of " + std::to_string(shard) + " ranks do not fill hosts of " +
                  joined_numbers(topology.ranks_of_hosts) +
                  " ranks, so some would lie across hosts. [T0979] hint: take \"FULL_SHARD\" without \"mesh\"" +
                  mesh_that_fits(topology));
}

}  // namespace

MeshShape mesh_shape(const Strategy& strategy, const Topology& topology) {
  const std::int64_t world = topology.world_size;
  std::int64_t replicate = strategy.mesh.replicas(), shard = strategy.mesh.shards();
  const bool is_by_axes = strategy.placement.is_given();
  const bool over_hosts = is_by_axes || strategy.strategy == ShardingStrategy::kHybridShard;
  if (replicate == 0 && shard == 0) {
    if (over_hosts) expect_equal_hosts(strategy, topology);
    replicate = over_hosts ? topology.num_hosts() : 1;
  }
  if (replicate == 0) replicate = shard > 0 && world % shard == 0 ? world / shard : 1;
  if (shard == 0) shard = world % replicate == 0 ? world / replicate : world;
  if (replicate * shard != world) {
    throw Error(ExitCode::kConfig, "/mesh: replicate " + std::to_string(replicate) + " x shard " +
                                       std::to_string(shard) + " = " + std::to_string(replicate * shard) +
                                       ", but the world size is " + std::to_string(world) + " (" + topology.launcher +
                                       "). [T0239] hint: take a shape that fits (replicate x shard):" +
                                       shapes_that_fit(topology.world_size));
  }
  if (!is_by_axes && strategy.strategy == ShardingStrategy::kFullShard && replicate > 1) {
    throw Error(
        ExitCode::kConfig,
        "/mesh: FULL_SHARD shards over the whole world, but the mesh replicates " + std::to_string(replicate) +
            " times. [T0240] hint: take \"HYBRID_SHARD\" or a \"placement\" over [\"rank\"], which do both, or leave "
            "replicate out");
  }
  expect_groups_on_hosts(static_cast<int>(shard), topology);
  return {static_cast<int>(replicate), static_cast<int>(shard)};
}

MeshPosition planned_position(const SyncConfig& sync, const MeshPosition& mesh) {
  if (!sync.makes_outer_steps()) return mesh;
  return {1, mesh.shard_size, 0, mesh.shard_index};
}

int parts_for(const Strategy& strategy, const MeshPosition& mesh) { return parts_of(placement_of(strategy), mesh); }

bool would_share_memory(const MeshShape& shape, const Topology& topology, TransportChoice transport) {
  const bool by_memory = transport == TransportChoice::kAuto || has(transport, transport_traits::kSharedMemory);
  return by_memory && topology.hosts_hold_whole_groups_of(shape.shard);  // the ranks of a shard group have consecutive
                                                                         // numbers
}

}  // namespace tessera
