#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/elementwise_optimizer.h"
#include "tessera/engine.h"
#include "tessera/mesh.h"
#include "tests/support/small_models.h"

namespace tessera::testing {

/// The results of a run of Tiny.
struct Trained {
  std::vector<StepResult> steps;
  std::vector<std::pair<std::string, at::Tensor>> values;  ///< fp32 master weights where sharded state has them
  TrafficCounts traffic;
  MemoryUse allocated_at_end;  ///< when nothing beyond the plan is needed any more
};

/// What is trained, and for how long.
struct TrainOptions {
  TinyOptions model;
  std::int64_t steps = 4;
  std::int64_t batch = 12;  ///< global, divided over ranks and microbatches
  std::int64_t length = 5;
  bool deferred = true;
  OwnRules own_rules = {};  ///< rules for optimizer.type own and own_matrix
};

/// Trains Tiny under `strategy` on this rank and returns what every rank sees.
Trained train_on(const Mesh& mesh, const Strategy& strategy, const TrainOptions& options);

/// The same on `ranks` threads; returns rank 0's.
Trained train_on_threads(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options);

/// The same without Tessera's engine: one process, the whole batch, torch::optim::AdamW, clipping by LibTorch.
Trained train_plainly(const Strategy& strategy, const TrainOptions& options);

/// Largest |a - b| / (|b| + 1) over all values.
double largest_difference(const Trained& a, const Trained& b);
void expect_same_bits(const Trained& a, const Trained& b, const std::string& what);

}  // namespace tessera::testing
