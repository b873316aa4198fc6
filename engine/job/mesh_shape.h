#pragma once

// See docs/glossary.md: placement.

#include "sharding/layout/placement.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

/// The shape of a mesh of ranks: the number of replicas, and the number of ranks that hold one replica together.
struct MeshShape {
  int replicate = 1;
  int shard = 1;
  /// Returns the position of `rank` in a mesh of this shape.
  MeshPosition position_of(int rank) const { return MeshPosition{replicate, shard}.of(rank); }
};

/// Returns the strategy's mesh for this world. If the strategy does not give a mesh, HYBRID_SHARD and placements by
/// axes replicate across hosts, and all other strategies shard over the world. Throws tessera::Error (78) if the
/// numbers do not fit; the message says where each number comes from, and which shapes fit.
MeshShape mesh_shape(const Strategy& strategy, const Topology& topology);

/// Returns the position of a rank in the mesh for which memory is planned. If replicas train by themselves
/// (SyncConfig), that mesh has only the ranks of the rank's replica.
MeshPosition planned_position(const SyncConfig& sync, const MeshPosition& mesh);

/// Returns the number of parts into which the strategy cuts a flat buffer on that mesh.
int parts_for(const Strategy& strategy, const MeshPosition& mesh);

/// Returns whether the ranks of a shard group will share memory. Plans of jobs that do not run call this function; an
/// Engine asks its transport.
bool would_share_memory(const MeshShape& shape, const Topology& topology, TransportChoice transport);

}  // namespace tessera
