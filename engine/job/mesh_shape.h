#pragma once

#include "sharding/layout/placement.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

struct MeshShape {
  int replicate = 1;
  int shard = 1;
  /// Where `rank` is in a mesh of this shape.
  MeshPosition position_of(int rank) const { return MeshPosition{replicate, shard}.of(rank); }
};

/// The strategy's mesh for this world. Left out: HYBRID_SHARD replicates across hosts, all others shard over the world.
/// Throws tessera::Error (exit code 78) with the numbers, where each came from, and the shapes that fit.
MeshShape mesh_shape(const Strategy& strategy, const Topology& topology);

/// Where a rank is in the mesh that it is planned on: its replica alone, where replicas train by themselves (SyncConfig).
MeshPosition planned_position(const SyncConfig& sync, const MeshPosition& mesh);

/// Into how many parts the strategy cuts a flat buffer on that mesh.
int parts_for(const Strategy& strategy, const MeshPosition& mesh);

/// Will the ranks of a shard group share memory? For plans of jobs that are not running; an Engine asks its transport.
bool would_share_memory(const MeshShape& shape, const Topology& topology, TransportChoice transport);

/// Likewise: will gradients be summed over a network on some axis (Collectives::reduces_in_background)?
bool would_reduce_in_background(const Topology& topology, TransportChoice transport);

/// Likewise: what the groups that sum gradients would answer to Collectives::compressed_part.
struct CompressedParts {
  int shard = 0, replicate = 0;
};
CompressedParts would_compress(const MeshShape& shape, const Topology& topology, TransportChoice transport);

}  // namespace tessera
