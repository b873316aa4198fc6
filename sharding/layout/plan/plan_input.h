#pragma once

// See docs/glossary.md: dealt, placement, slot, tier, unit.

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/base/state_dtype.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/layout/placement.h"
#include "sharding/layout/shapes.h"
#include "tessera/dtype.h"
#include "tessera/strategy.h"

namespace tessera {

/// A second copy of sharded parameters (Strategy::secondary), on these ranks.
struct SecondaryCopy {
  int ranks = 0;  ///< number of neighbours on the shard axis that hold one copy together; 0: there is no second copy
  SecondaryForm form = SecondaryForm::kPlain;
  bool is_rounded() const { return ranks > 0 && form == SecondaryForm::kInt8; }
};

/// The placement of parameters, gradients and optimizer state. It has the axes of the mesh over which they are cut, the
/// device, and the number of units that are gathered at once.
struct PlannedPlacement : Placement {
  using Placement::operator=;  ///< takes the cuts of a strategy (placement_of) and does not change the ranks
  MeshPosition mesh;
  /// Whether a GPU trains. Reductions then run during backward: each may take as long as a unit's backward, however
  /// much memory is then needed.
  bool is_queued = false;
  std::int64_t prefetch = 1;
  /// Number of replicas that train by themselves, if there are outer steps; `mesh` is in this case the mesh of one
  /// replica.
  int replicas = 1;
  SecondaryCopy secondary = {};
};

/// The state that is offloaded, or is copied to checkpoints or commits. OffloadConfig::paths are left out, since no
/// size depends on them.
struct PlannedTiers : OffloadConfig {
  using OffloadConfig::operator=;   ///< takes the tiers of a strategy and does not change the rest
  bool copies_checkpoints = false;  ///< CheckpointConfig::async
  bool is_durable = false;          ///< whether DurableConfig asks for commits
};

/// The way in which the gradients of a step's microbatches are summed, and the form in which values are sent between
/// ranks.
struct PlannedWire {
  DType reduce = DType::kF32;
  std::int64_t accumulation = 1;  ///< MicrobatchOrder::each
  GradientSync sync = GradientSync::kEachMicrobatch;
  bool reproducible = false;  ///< Strategy::reproducible
  /// Largest number of microbatches of a step that a rank may be dealt (MicrobatchOrder::longest); 0: each rank has
  /// `accumulation`.
  std::int64_t longest_run = 0;
  std::int64_t backups = 0, microbatches = 0;  ///< MicrobatchOrder::backups and total
  /// The number of fp64 numbers that a rank sends to other ranks for each microbatch under "broadcast_buffers"
  /// microbatch_order: the changes of the module's running statistics. Otherwise it is 0.
  std::int64_t statistics_numel = 0;
  /// number of units that get gradients at the same time: 2 if units may cut modules (units.bucket_cap_mb), else 1
  int filling_buckets = 1;
  /// Whether reductions over a network, on some axis, run in the background while ranks compute
  /// (Collectives::reduces_in_background).
  bool reduces_in_background = false;
  std::optional<std::int64_t> reductions_ahead;  ///< Strategy::reductions_ahead
  CompressionConfig compression = {};
  /// compression.gathers, if parameters are sent over a network: on the shard axis, and for updated parameters on the
  /// replicate axis. The form may be lossy only for units in slots, since parameters that stay in memory are updated
  /// there.
  WireForm gathers = WireForm::kPlain, replica_gathers = WireForm::kPlain;
  /// Collectives::compressed_part of the group of each axis; 0 also if `compression` does not affect the axis.
  int compressed_shard_part = 0, compressed_replicate_part = 0;
};

/// The optimizer's states for each element, and the work of an update after it has the sums.
struct PlannedUpdate {
  MasterKind master = MasterKind::kSplitBF16;
  StateFormats states = {StateDType::kF32, StateDType::kF32};  ///< formats of the optimizer's states
  /// formats of states in groups that are updated as matrices
  StateFormats matrix_states = {};
  MatrixWork matrix_work = {};
  bool in_backward = false;  ///< whether a unit is updated as soon as its gradients are summed (optimizer.in_backward)
  /// `twice` is true if an update goes over all state twice (lamb, lars). In this case the first pass only reads
  /// parameters. It also only reads states, unless `first_pass_moves_states` is true.
  bool twice = false, first_pass_moves_states = false;
  /// CheckConfig::values: whether all values are checked after each step. No size depends on it, but
  /// MemoryPlan::publishes_behind does.
  bool checks_values = false;
  SyncConfig outer = {};  ///< outer steps of replicas, or the settings of asynchronous ranks
};

/// All inputs on which the memory of a rank depends, and nothing else. The engine fills it from the strategy and the
/// module. A function that needs only one member takes that member.
struct PlanInput {
  std::vector<UnitShape> units;  ///< the root unit comes first
  PlannedPlacement placement;
  PlannedTiers tiers;
  PlannedWire wire;
  PlannedUpdate update;
};

/// Returns the fraction of a state, 0 to 1, that is certainly offloaded. It is 0 for tier "auto", which is not decided
/// yet.
inline double share_below(const OffloadedState& state) {
  return state.tier == Tier::kNvme || state.tier == Tier::kHost ? state.fraction : 0.0;
}

}  // namespace tessera
