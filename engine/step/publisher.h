#pragma once

// See docs/glossary.md: unit.

#include <deque>

#include "runtime/comm/mesh_groups.h"
#include "sharding/compute_device.h"
#include "sharding/gather/publication.h"
#include "sharding/unit.h"

namespace tessera {

/// Sends updated values to the ranks that hold copies of them, by all-gathers. StepWalk owns it and calls it from the
/// thread that trains. Its calls are collective.
class Publisher {
 public:
  /// `behind` lets gathers over the shard axis continue during the next forward. If it is null, `wait` waits for these
  /// gathers.
  Publisher(const MemoryPlan& plan, const MeshAxes& axes, Publication* behind, QueueClock* waits = nullptr)
      : plan_(plan), axes_(axes), behind_(behind), waits_(waits) {}

  /// Call it before values of all units, or of `unit`, change. It returns when all ranks have the values that were
  /// published before.
  void begin() {
    if (behind_) behind_->finish();
  }
  void begin(Unit& unit) {
    if (behind_) behind_->drop(unit);
  }

  /// Starts to send a group's values. The axis whose parts lie inside the parts of the other axis is gathered first
  /// (AxisPlacement::replicate_first).
  void publish(FlatGroup& group);
  /// Waits for all started gathers, except those that may continue after the update (`behind`).
  void wait();
  /// Waits until all ranks that share one copy of the values have called it.
  void meet();

  /// Returns the seconds spent in this object so far, without gathers that continue after the update.
  double seconds() const { return seconds_; }

 private:
  void gather_shards_first(FlatGroup& group, bool over_replicas, bool over_shards);

  const MemoryPlan& plan_;
  const MeshAxes& axes_;
  Publication* const behind_;
  QueueClock* const waits_;
  std::deque<Work> under_way_;  ///< all-gathers that the transport advances by itself
  double seconds_ = 0;
};

}  // namespace tessera
