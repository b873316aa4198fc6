#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/elementwise_optimizer.h"
#include "tessera/engine.h"
#include "tessera/mesh.h"
#include "tests/support/small_models.h"

namespace tessera::testing {

/// Runs `body` on threads and returns what it returned on rank 0.
template <typename Body>
auto of_rank_zero(const ThreadRanks& ranks, const Body& body) {
  std::invoke_result_t<Body, const Mesh&> first{};
  run_ranks(ranks, [&](const Mesh& mesh) {
    auto own = body(mesh);
    if (mesh.rank() == 0) first = std::move(own);
  });
  return first;
}

/// The results of training Tiny.
struct Trained {
  std::vector<StepResult> steps;
  /// fp32 master weights if sharded state has them, and parameters otherwise
  std::vector<std::pair<std::string, at::Tensor>> values;
  TrafficCounts traffic;
  MemoryUse allocated_at_end;  ///< the memory at the end, when only the memory of the plan is in use
};

/// The model to train, and the number of steps.
struct TrainOptions {
  TinyOptions model;
  std::int64_t steps = 4;
  std::int64_t batch = 12;  ///< the rows of the global batch, which is divided over ranks and microbatches
  std::int64_t length = 5;
  bool deferred = true;
  OwnRules own_rules = {};  ///< the rules of the optimizer.type values own and own_matrix
};

/// Trains Tiny under `strategy` on this rank, and returns the results, which all ranks see.
Trained train_on(const Mesh& mesh, const Strategy& strategy, const TrainOptions& options);

/// Trains on `ranks` threads and returns the result of rank 0.
Trained train_on_threads(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options);

/// Trains without an Engine of Tessera: with one process, the whole batch, torch::optim::AdamW, and LibTorch's
/// clipping.
Trained train_plainly(const Strategy& strategy, const TrainOptions& options);

/// Returns the largest |a - b| / (|b| + 1) over all values.
double largest_difference(const Trained& a, const Trained& b);
void expect_same_bits(const Trained& a, const Trained& b, const std::string& what);

}  // namespace tessera::testing
