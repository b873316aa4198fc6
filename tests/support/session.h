#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/elementwise_optimizer.h"
#include "tessera/exit_code.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {

/// One strategy for each placement of parameters and gradients.
inline const Placed kOnePerPlacement[] = {ShardingStrategy::kNoShard,
                                          ShardingStrategy::kShardGradients,
                                          ShardingStrategy::kShardGradOp,
                                          ShardingStrategy::kFullShard,
                                          Placed(ShardingStrategy::kFullShard, /*shared=*/true),
                                          Placed(ShardingStrategy::kFullShard, /*shared=*/false, /*on_disk=*/true),
                                          Placed(ShardingStrategy::kFullShard, /*shared=*/true, /*on_disk=*/true)};

/// The placements in which all parameters are in memory.
inline const std::span<const Placed> kInMemory = std::span(kOnePerPlacement).first(5);

using Adjust = std::function<void(Strategy&)>;
using Values = std::vector<std::pair<std::string, at::Tensor>>;

/// Returns tiny_strategy with clipping and with the changes that `adjust` makes.
Strategy strategy_for(const Placed& placed, const Adjust& adjust = nullptr, DType dtype = DType::kF32);

/// Sets updates of units in backward, and no clipping.
void update_in_backward(Strategy& strategy);

/// Returns this rank's rows of a global batch.
at::Tensor rows_of(const at::Tensor& batch, const Mesh& mesh);

/// Tiny and its batches on this rank, for tests that write their own training loop.
struct Session {
  /// `own_rules` are the rules of the optimizer.type values own and own_matrix.
  Session(const Mesh& mesh, const Strategy& strategy, TinyOptions options = {}, const OwnRules& own_rules = {});
  at::Tensor loss(std::size_t i);
  StepResult train(std::size_t i);
  Values values();

  const Mesh& mesh;
  Tiny model;
  Engine engine;
  std::vector<Batch> batches;
  std::size_t microbatches;  ///< the number of microbatches per step
};

/// Returns the values after `steps` steps of a new Session.
Values trained(const Mesh& mesh, const Strategy& strategy, std::size_t steps, TinyOptions options = {},
               const OwnRules& own_rules = {});

/// Trains some steps. Checks that every two successive steps move as many bytes to and from the disk as the plan says.
void expect_planned_disk_traffic(Session& session, const std::string& what);

bool all_same_bits(const Values& a, const Values& b);
/// The values of the first of several runs that must have the same result.
class FirstValues {
 public:
  /// Returns true for the first values, and for later values that have the same bits.
  bool same_bits(const Values& values) {
    if (!first_) first_ = values;
    return all_same_bits(values, *first_);
  }
  /// Compares the values of rank 0 only. Returns true on the other ranks.
  bool same_bits(const Mesh& mesh, const Values& values) { return mesh.rank() != 0 || same_bits(values); }

 private:
  std::optional<Values> first_;
};
/// Checks that values differ at most by `tolerance` times (1 + their magnitude).
void expect_close(const Values& got, const Values& wanted, double tolerance, const std::string& what);

/// Returns the message of the exception that `call` throws, or an empty text if it throws nothing.
std::string error_of(const std::function<void()>& call);
/// Returns the text of the tessera::Error that `call` throws, and expects it to have this exit code.
std::string error_of(ExitCode code, const std::function<void()>& call);
/// Returns the message of a call in the wrong order, which throws tessera::Error (64).
std::string usage_error_of(const std::function<void()>& call);

/// Runs `body` on `ranks` threads, once under each placement.
void on_each_placement(int ranks, const std::function<void(const Mesh&, const Strategy&)>& body,
                       const Adjust& adjust = nullptr, DType dtype = DType::kF32);
/// Runs `body` on `ranks` threads, once under each of `placements`.
void on_placements(std::span<const Placed> placements, int ranks,
                   const std::function<void(const Mesh&, const Strategy&)>& body, const Adjust& adjust = nullptr,
                   DType dtype = DType::kF32);

}  // namespace tessera::testing
