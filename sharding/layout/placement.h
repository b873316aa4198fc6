#pragma once

// See docs/glossary.md: placement.

#include <set>

#include "sharding/layout/layout.h"
#include "tessera/strategy.h"

namespace tessera {

/// The placement of one kind of state on each axis of the mesh. Either the state is cut over the axis, or each rank
/// along the axis holds a copy.
struct AxisPlacement {
  bool shard = false;      ///< whether state is cut over the shard axis
  bool replicate = false;  ///< whether state is cut over the replicate axis
  /// The order of the cuts if both axes cut. If it is true, the replicate axis cuts first, and the shard axis cuts the
  /// parts. If it is false, the shard axis cuts first.
  bool replicate_first = false;
};

/// The placement of a strategy, by its name (runtime/config/placement_rows.h) or by axes. All other code reads these
/// fields and does not use the strategy's name.
struct Placement {
  AxisPlacement parameters;
  AxisPlacement gradients;
  AxisPlacement optimizer;
  /// Whether sharded parameters stay gathered from their first use in forward to the end of backward.
  bool keep_gathered = false;
  /// Whether the ranks of the shard axis hold one copy of the parameters together, in memory that all of them map. Each
  /// rank then updates its part in place, and nothing is gathered.
  bool shared = false;
};

/// Returns the placement of a strategy. If `optimizer_over_world` is true, HYBRID_SHARD cuts gradients and optimizer
/// state over both axes.
Placement placement_of(ShardingStrategy strategy, bool optimizer_over_world);
/// Returns the placement that a strategy gives, by its name or by axes (PlacementConfig).
Placement placement_of(const Strategy& strategy);

/// Returns `placement` for a shard axis whose ranks can share memory (Collectives::shares_memory). If the optimizer is
/// cut over that axis first, all its ranks use one copy of the parameters. Otherwise the placement does not change,
/// since each rank updates everything, or parts of several replicas' shards, which are not neighbours.
Placement share_parameters(Placement placement);

/// The position of this rank in a mesh of replicate x shard ranks.
struct MeshPosition {
  int replicate_size = 1, shard_size = 1;
  int replicate_index = 0, shard_index = 0;
  int world_size() const { return replicate_size * shard_size; }
  /// Returns the position of `rank` in the same mesh. A shard group is a run of neighbouring ranks.
  MeshPosition of(int rank) const { return {replicate_size, shard_size, rank / shard_size, rank % shard_size}; }
};

/// Returns the number of equal parts into which a flat buffer must be divisible for this placement.
int parts_of(const Placement& placement, const MeshPosition& mesh);

/// Returns the part of a flat buffer of `numel` elements that this rank holds. The shard axis cuts first and the
/// replicate axis cuts the parts, unless AxisPlacement::replicate_first is set. A rank's optimizer part lies inside its
/// gradient part, and its gradient part inside its parameter part.
Extent owned(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel);

/// Calls `visit(rank, part)` for every distinct part of a flat buffer, with the first rank that holds it.
template <class Visit>
void for_each_part(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel, const Visit& visit) {
  std::set<std::int64_t> visited;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const Extent part = owned(axes, mesh.of(rank), numel);
    if (visited.insert(part.offset).second) visit(rank, part);
  }
}

}  // namespace tessera
