#pragma once

#include <deque>

#include "runtime/comm/mesh_groups.h"
#include "sharding/compute_device.h"
#include "sharding/unit.h"

namespace tessera {

/// Makes updated values known to the ranks that hold copies of them. Collective.
class Publisher {
 public:
  Publisher(const MemoryPlan& plan, const MeshAxes& axes, QueueClock* waits = nullptr)
      : plan_(plan), axes_(axes), waits_(waits) {}

  /// Starts to make a group's values known. Over the replicate axis first, since its parts lie inside those of the shard
  /// axis.
  void publish(FlatGroup& group);
  /// Ends what was started for all groups. Ranks that share one copy wait for each other once.
  void finish();

  /// Seconds spent here so far.
  double seconds() const { return seconds_; }

 private:
  const MemoryPlan& plan_;
  const MeshAxes& axes_;
  QueueClock* const waits_;
  std::deque<Work> under_way_;  ///< all-gathers whose transport goes on by itself
  double seconds_ = 0;
};

}  // namespace tessera
