#pragma once

#include "engine/job/mesh_shape.h"
#include "engine/memory/make_plan.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"

namespace tessera {

/// The abilities of the groups that gather parameters and sum gradients. An Engine asks its groups for them. A plan of
/// a job that does not run predicts them (planned_abilities).
struct GroupAbilities {
  bool shares_memory = false;                ///< PlanScene::shares_memory
  bool is_queued = false;                    ///< PlanScene::is_queued
  bool reduces_in_background = false;        ///< whether the group of any axis sums in the background (Collectives)
  bool shard_reduces_in_background = false;  ///< whether the group of the shard axis sums in the background
  /// The value of Collectives::compressed_part for the group of each axis.
  int shard_compressed_part = 0, replicate_compressed_part = 0;
};

/// Predicts the abilities of the groups of `topology`'s rank, on a mesh of this shape.
GroupAbilities planned_abilities(const Strategy& strategy, const MeshShape& shape, const Topology& topology);

/// Returns the scene for which memory is planned while `sync` is in effect (SyncConfig::after). Plans of running jobs,
/// and of jobs that do not run, are made from it. PlanScene::offloaded_step is left empty, since a measurement chooses
/// it.
PlanScene plan_scene(const SyncConfig& sync, const MeshPosition& position, const Topology& topology,
                     const GroupAbilities& abilities);

}  // namespace tessera
