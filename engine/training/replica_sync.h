#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/asynchronous/asynchronous_step.h"
#include "engine/asynchronous/backed_up_step.h"
#include "engine/asynchronous/common_parameters.h"
#include "engine/asynchronous/first_gradients.h"
#include "engine/asynchronous/host_copies.h"
#include "engine/asynchronous/pulled_parameters.h"
#include "engine/asynchronous/pulls.h"
#include "engine/asynchronous/servers/served_shards.h"
#include "engine/device/accelerator.h"
#include "engine/step/outer_steps.h"
#include "engine/step/step.h"
#include "runtime/base/metrics/latency_histogram.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/engine.h"
#include "tessera/strategy.h"

namespace tessera {

/// The effect of "sync" on training. Replicas train apart, each over the axes of its own ranks, and meet in outer
/// steps. There are no outer steps if ranks apply gradients to parameters that all ranks own together (asynchronous,
/// hogwild, backups). A Training has a ReplicaSync. Training calls it after steps and after other changes to masters,
/// and makes replicas meet before other code reads masters. If replicas do not train apart, these calls do nothing.
class ReplicaSync {
 public:
  /// `steps`: number of steps that training has made. The object refers to `strategy`.
  ReplicaSync(const Strategy& strategy, std::int64_t steps)
      : strategy_(strategy), later_(strategy.sync), now_(strategy.sync.after(steps)) {}

  /// Returns whether replicas train apart now.
  bool is_apart() const { return trains_apart(now_); }
  /// Returns whether replicas begin to train apart only in a later step (SyncConfig::start_step).
  bool comes_later() const { return trains_apart(later_) && !is_apart(); }
  /// Returns whether replicas begin or stop to train separately after `steps` steps. If so, training is planned anew.
  bool changes_after(std::int64_t steps) const { return trains_apart(later_.after(steps)) != is_apart(); }
  /// Returns the configuration that is in effect.
  const SyncConfig& config() const { return now_; }

  /// Returns the axes over which training communicates: the axes of this replica's ranks if it trains separately, else
  /// `whole`, the axes of the mesh. `on_gpu`: whether a GPU trains. It is collective. Throws tessera::Error (78) if
  /// ranks have common parameters that are not on servers, and ranks cannot share memory, or if the launcher has
  /// started servers and the strategy has none.
  MeshAxes axes(const Mesh& mesh, const MeshAxes& whole, bool on_gpu);
  /// Adds to `use` the memory that is needed beyond TrainingMemory. It keeps references to the other arguments.
  /// REQUIRES: units have their first values.
  void begin(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& replica,
             const MeshAxes& whole, const Accelerator& accelerator, MemoryUse& use);
  /// Makes the step of a rank with common parameters; null if ranks have no common parameters. Call it after `begin`.
  std::unique_ptr<Step> make_step(const StepContext& context, GradientNorm& norm) const;
  /// If ranks train copies that they pull, makes each read of a unit pull the unit's values from now on. Returns true
  /// in that case; operators must then be watched. `on_pulled` is called for units whose values have changed.
  bool pulls(const std::vector<std::unique_ptr<Unit>>& units, std::function<void(Unit&)> on_pulled,
             UnitKeeper::OnFailure on_failure);
  /// From now on, measures how long each unit's pulls take (PulledParameters::time_pulls).
  void time_pulls(std::span<LatencyHistogram> latencies) {
    if (PulledParameters* const shards = pulled()) shards->time_pulls(latencies);
  }
  /// After this call, reading a unit no longer pulls its values.
  void stop_pulls() { pulls_.reset(); }
  /// Pulls the newest values once more, if ranks train copies that they pull (PulledParameters::take_newest).
  void take_newest() {
    if (PulledParameters* const shards = pulled()) shards->take_newest();
  }

  // The next functions pass their calls on to OuterSteps or to CommonParameters.
  void after(std::int64_t step) {
    if (outer_) outer_->after(step);
  }
  /// Returns whether replicas must meet. Ranks with common parameters may have made different numbers of steps, so they
  /// always meet.
  bool is_due() const { return (outer_ && outer_->is_due()) || common_; }
  void step() { outer_ ? outer_->step() : common_->bring_together(); }  ///< REQUIRES: is_due
  /// Returns this rank's connection to the servers if workers may join and leave ("sync.elastic"); else null.
  ServedShards* elastic() const { return now_.is_elastic() ? served_ : nullptr; }
  /// Returns the number of steps that this rank has skipped in `step`, since other ranks had already made them ("sync"
  /// backups).
  std::int64_t take_skipped() { return first_ ? first_->take_skipped() : 0; }
  void meet(Step& step) {
    if (outer_) outer_->meet(step);
    if (common_) agree_on_steps(step);
  }
  void adopt() {
    if (outer_) outer_->adopt();
    if (common_) common_->adopt();
  }
  void forget_momentum() {
    if (outer_) outer_->forget_momentum();
  }
  absl::Status for_each_momentum(const OuterSteps::VisitMomentum& visit) const {
    return outer_ ? outer_->for_each_momentum(visit) : absl::OkStatus();
  }
  void add_to(TrafficCounts& counts) const {
    if (const PulledParameters* const shards = pulled()) {
      counts.gathers += shards->pulls();
      counts.gathered_bytes += shards->pulled_bytes();
      counts.gather_seconds += shards->pull_seconds();
    }
    if (!outer_) return;
    counts.reductions += outer_->sums();
    counts.reduced_bytes += outer_->sent_bytes();
  }

  /// Returns the seconds of outer steps; the Step counts the seconds of asynchronous ranks.
  double communication_seconds() const { return outer_ ? outer_->seconds() : 0; }

 private:
  static bool trains_apart(const SyncConfig& config) { return config.type != SyncType::kEachStep; }
  PulledParameters* pulled() const { return common_ ? common_->pulled() : nullptr; }
  void push_to(std::unique_ptr<PushedParameters> parameters);
  void agree_on_steps(Step& step);

  const Strategy& strategy_;
  const SyncConfig later_, now_;
  std::unique_ptr<OuterSteps> outer_;     ///< null if there are no outer steps
  std::shared_ptr<Collectives> replica_;  ///< with servers: the ranks that make each step together; null if each rank
                                          ///< makes its own steps
  // The following members are null if ranks have no common parameters. Members are destroyed last to first.
  std::unique_ptr<PeerBoard> board_;
  std::shared_ptr<Collectives> readers_;  ///< with backups: the ranks that read each other's gradients
  std::unique_ptr<HostCopies> copies_;
  std::unique_ptr<CommonParameters> common_;
  PushedParameters* pushed_ = nullptr;  ///< equal to common_ if ranks push gradients; else null
  FirstGradients* first_ = nullptr;     ///< equal to common_ if "sync" is backups; else null
  ServedShards* served_ = nullptr;      ///< equal to common_ if servers own the shards; else null
  std::unique_ptr<Pulls> pulls_;
};

}  // namespace tessera
