#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/device/accelerator.h"
#include "engine/step/outer_place.h"
#include "engine/step/outer_steps.h"
#include "engine/step/step.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/engine.h"
#include "tessera/strategy.h"

namespace tessera {

/// What "sync" makes of training: replicas that train apart, each over the axes of its own ranks, and meet in outer
/// steps. A Training has one, tells it of its steps and of what changes masters beside them, and has it meet before
/// others read. Where replicas do not train apart, all of that does nothing.
class ReplicaSync {
 public:
  /// `steps`: those that training has made.
  ReplicaSync(const SyncConfig& config, std::int64_t steps) : later_(config), now_(config.after(steps)) {}

  /// Whether replicas train apart now.
  bool is_apart() const { return now_.makes_outer_steps(); }
  /// Whether they will only later (SyncConfig::start_step).
  bool comes_later() const { return later_.makes_outer_steps() && !is_apart(); }
  /// Whether they begin or end to, once `steps` steps are made: then training is planned anew.
  bool changes_after(std::int64_t steps) const { return later_.after(steps).makes_outer_steps() != is_apart(); }
  /// In effect.
  const SyncConfig& config() const { return now_; }

  /// Those that training speaks over: of `whole`, the mesh's, this replica's ranks where it trains apart. Collective.
  MeshAxes axes(const Mesh& mesh, const MeshAxes& whole) const {
    return is_apart() ? value_or_throw(groups_of(mesh).within_replica(whole)) : whole;
  }
  /// Units have their first values. Adds what outer steps need to `use`. Refers to all but that.
  void begin(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& replica,
             const MeshAxes& whole, const Accelerator& accelerator, MemoryUse& use) {
    if (!is_apart()) return;
    outer_ = std::make_unique<OuterSteps>(units, plan, replica, whole, outer_place_of(accelerator));
    use[MemoryCategory::kOptimizer] += outer_->memory_bytes();
    use[MemoryCategory::kStaging] += outer_->scratch_bytes();
  }

  // As OuterSteps has them:
  void after(std::int64_t step) {
    if (outer_) outer_->after(step);
  }
  bool is_due() const { return outer_ && outer_->is_due(); }
  void step() { outer_->step(); }  ///< REQUIRES: is_due
  void meet(Step& step) {
    if (outer_) outer_->meet(step);
  }
  void adopt() {
    if (outer_) outer_->adopt();
  }
  void forget_momentum() {
    if (outer_) outer_->forget_momentum();
  }
  absl::Status for_each_momentum(const OuterSteps::VisitMomentum& visit) const {
    return outer_ ? outer_->for_each_momentum(visit) : absl::OkStatus();
  }
  void add_to(TrafficCounts& counts) const {
    if (!outer_) return;
    counts.reductions += outer_->sums();
    counts.reduced_bytes += outer_->sent_bytes();
  }

 private:
  const SyncConfig later_, now_;
  std::unique_ptr<OuterSteps> outer_;  ///< null where replicas do not train apart
};

}  // namespace tessera
