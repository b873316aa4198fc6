#pragma once

// See docs/glossary.md: unit.

#include <algorithm>
#include <cstdint>

#include "runtime/comm/mesh_groups.h"
#include "sharding/compute_device.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// Counts of the work of a Reducer so far.
struct ReducerCounts {
  std::int64_t reductions = 0;        ///< number of units that were reduced over the shard axis
  std::int64_t reduced_bytes = 0;     ///< bytes of gradients sent into reductions
  double reduction_seconds = 0;       ///< time spent in reductions, including waits for other ranks
  std::int64_t overflow_buckets = 0;  ///< number of buckets beyond the plan, for gradients that came in another order
  std::int64_t overflow_bytes = 0;    ///< bytes of buckets and scratch beyond the plan that are held now
  std::int64_t overflow_peak = 0;     ///< largest `overflow_bytes` since `Reducer::reset`

  /// Counts `bytes` of memory beyond the plan; a negative number if memory was freed.
  void hold(std::int64_t bytes) {
    overflow_bytes += bytes;
    overflow_peak = std::max(overflow_peak, overflow_bytes);
  }
};

/// The plan, the ranks and the device that all parts of a Reducer use. Plan and axes must outlive the parts.
struct ReduceSetup {
  const MemoryPlan& plan;
  const MeshAxes& axes;
  ComputeDevice device;
  bool is_alone = false;  ///< whether there is a single rank and sums are not offloaded; gradients are then copied
                          ///< directly to their sum's place, and nothing is reduced

  const MeshPosition& mesh() const { return plan.placement().mesh; }
  /// Returns whether gradients stay in place until `Reducer::finish`. Otherwise a unit is reduced as soon as its
  /// gradients are complete.
  bool accumulates() const { return plan.keeps_gradients(); }
  bool updates_in_backward() const { return plan.update().in_backward; }
  /// Returns whether sums are made by the tree over microbatches ("reproducible").
  bool makes_tree() const { return plan.wire().reproducible; }
};

}  // namespace tessera
