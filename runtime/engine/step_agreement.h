#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/mesh.h"
#include "sharding/reducer.h"
#include "sharding/unit.h"

namespace tessera {

/// What one rank knows at the end of a step's backward.
struct LocalStep {
  double loss = 0.0;  ///< mean over this rank's microbatches
  std::int64_t tokens = 0, samples = 0;
};

/// What all ranks agree on before the update: the same bits everywhere.
struct AgreedStep {
  double loss = 0.0;             ///< mean over ranks, summed in rank order
  std::int64_t tokens = 0, samples = 0;
  double sum_of_squares = 0.0;   ///< of the summed, unscaled gradients of all units
  bool finite = true;
  /// [trainable parameter, in unit, group, layout order]: did any rank give it a gradient?
  std::vector<char> used;
  bool all_used = true;
};

/// Makes every rank agree, with one small all-gather. The norm is a sum over fixed blocks of each unit's layout, combined
/// in block order, so it has the same bits however gradients are sharded (optim/grad_norm.h).
AgreedStep agree_on_step(const LocalStep& local, const std::vector<std::unique_ptr<Unit>>& units,
                         const Reducer& reducer, const MemoryPlan& plan, const MeshAxes& axes);

}  // namespace tessera
