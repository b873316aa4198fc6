#pragma once

#include "runtime/comm/mesh.h"
#include "sharding/unit.h"

namespace tessera {

/// Makes updated values known to the ranks that hold copies of them. Collective.
class Publisher {
 public:
  Publisher(const MemoryPlan& plan, const MeshAxes& axes) : plan_(plan), axes_(axes) {}

  /// Over the replicate axis first, since its parts lie inside those of the shard axis.
  void publish(FlatGroup& group);
  /// After all groups: ranks that share one copy wait for each other, once.
  void finish();

  /// Spent so far.
  double seconds() const { return seconds_; }

 private:
  const MemoryPlan& plan_;
  const MeshAxes& axes_;
  double seconds_ = 0;
};

}  // namespace tessera
