// Tests a program's own update rules for whole matrices. Matrices are dealt to owners, sharded, averaged and saved as
// with Muon.

#include "tessera/matrix_optimizer.h"

#include <ATen/ops/mm.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/stand_ins/own_muon.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace matrix_optimizer_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using Matrix = MatrixOptimizer::Matrix;
using State = MatrixOptimizer::State;
using Rule = std::shared_ptr<const MatrixOptimizer>;

/// A rule that has states of many shapes and uses all the numbers that it gets.
struct Shapes final : MatrixOptimizer {
  std::vector<State> states(std::int64_t rows, std::int64_t columns) const override {
    return {{"left", {rows, rows}}, {"right", {columns}}, {"nothing", {0}}, {"count", {}}, {"first", {rows, columns}}};
  }
  void update(Matrix& m) const override {
    m.states[0].mul_(0.9).add_(m.gradient.mm(m.gradient.t()), 0.1);
    m.states[1].mul_(0.9).add_(m.gradient.square().sum(0), 0.1);
    m.states[3].add_(1);
    TORCH_CHECK(m.states[3].item<float>() == static_cast<float>(m.step));
    m.states[4].mul_(0.9).add_(m.gradient, 0.1);
    const at::Tensor scale = m.states[0].diag().sqrt().unsqueeze(1) + m.states[1].sqrt() + 1e-3;
    m.parameter.mul_(1 - m.lr * m.weight_decay).sub_(m.states[4] / scale, m.lr);
  }
};

void with_own_matrix(Strategy& s) {
  s.optimizer = {.type = OptimizerType::kOwnMatrix, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1};
  s.optimizer.groups = {{.match = {"head"}, .type = OptimizerType::kAdamW},
                        {.match = {"blocks.1.*"}, .lr_ratio = 2, .weight_decay = 0.0}};
  s.gradient_clipping = 0;
}

void with_muon(Strategy& s) {
  with_own_matrix(s);
  s.optimizer.type = OptimizerType::kMuon;
  s.optimizer.muon.adjust_lr = MuonLrAdjustment::kMatchRmsAdamW;
}

/// Tiny and an Engine with `rule`.
struct MatrixSession {
  MatrixSession(const Mesh& mesh, const Strategy& strategy, Rule rule, TinyOptions options = kWide)
      : mesh(mesh),
        model(make_tiny(options, true)),
        engine(model, strategy, mesh, std::move(rule)),
        batches(make_batches(6, 24, 5, options.vocab)) {}

  StepResult train(std::size_t i) {
    const Batch& batch = batches[i % batches.size()];
    engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
    return engine.step();
  }
  Values values() {
    const Gathered all(engine);
    return values_of(*model);
  }

  const Mesh& mesh;
  Tiny model;
  Engine engine;
  std::vector<Batch> batches;
};

TEST(MatrixOptimizer, OwnMuonEqualsMuon) {
  for (const int ranks : {1, 2}) {
    const Values wanted = of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) {
      return trained(mesh, strategy_for(ShardingStrategy::kFullShard, with_muon), 6, kWide);
    });
    on_placements(
        kInMemory, ranks,
        [&](const Mesh& mesh, const Strategy& strategy) {
          MatrixSession session(mesh, strategy, std::make_shared<OwnMuon>());
          for (std::size_t i = 0; i < 6; ++i) session.train(i);
          const Values values = session.values();
          if (mesh.rank() == 0) expect_close(values, wanted, 1e-5, std::to_string(ranks) + " ranks");
        },
        with_own_matrix);
  }
}

TEST(MatrixOptimizer, EveryStrategyHasTheSameBitsAndThePlansMemory) {
  const Kept kinds[] = {{DType::kF32, MasterKind::kF32, StateDType::kF32},
                        {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32},
                        {DType::kBF16, MasterKind::kF32, StateDType::kF32}};
  for (const Kept& kept : kinds) {
    for (const int ranks : {2, 3}) {
      FirstValues first;
      on_placements(
          kInMemory, ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            MatrixSession session(mesh, strategy, std::make_shared<Shapes>(), kAwkward);
            for (std::size_t i = 0; i < 4; ++i) {
              const StepResult step = session.train(i);
              EXPECT_EQ(step.planned, step.allocated) << name_of(kept);
            }
            EXPECT_TRUE(first.same_bits(mesh, session.values())) << name_of(kept) << ", " << ranks << " ranks";
          },
          [&](Strategy& s) {
            adjusted_to(kept, nullptr)(s);
            with_own_matrix(s);
            s.ema.decay = 0.9;
            s.check.replica_hash_every = 1;
          },
          kept.param);
    }
  }
}

TEST(MatrixOptimizer, RuleGetsTheMeanGradientClippedByValue) {
  struct Sees final : MatrixOptimizer {
    mutable double largest = 0;
    std::vector<State> states(std::int64_t, std::int64_t) const override { return {}; }
    void update(Matrix& m) const override { largest = std::max(largest, m.gradient.abs().max().item<double>()); }
  };
  const auto seen = [](std::int64_t microbatches, double clip_value) {
    const auto rule = std::make_shared<Sees>();
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_for(ShardingStrategy::kNoShard, with_own_matrix);
      strategy.gradient_accumulation = microbatches;
      strategy.gradient_clip_value = clip_value;
      MatrixSession session(mesh, strategy, rule);
      const Batch& batch = session.batches[0];
      for (std::int64_t i = 0; i < microbatches; ++i)
        session.engine.backward(session.model->forward(batch.tokens, batch.targets));
      session.engine.step();
    });
    return rule->largest;
  };
  EXPECT_NEAR(seen(2, 0), seen(1, 0), 1e-6);
  EXPECT_GT(seen(1, 0), 1e-3);
  EXPECT_FLOAT_EQ(seen(1, 1e-4), 1e-4);
}

/// Trains steps [from, to), and saves a checkpoint in `path`. If `from` > 0, the checkpoint in `path` is loaded first.
Values matrices_trained_and_saved(int ranks, const Placed& placed, const std::string& path, std::size_t from,
                                  std::size_t to, Rule rule = std::make_shared<Shapes>()) {
  return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) {
    MatrixSession session(mesh, strategy_for(placed, with_own_matrix), rule);
    if (from > 0) load_checkpoint(session.engine, path);
    for (std::size_t i = from; i < to; ++i) session.train(i);
    save_checkpoint(session.engine, path);
    return session.values();
  });
}

TEST(MatrixOptimizer, StatesAreLoadedOnOtherNumbersOfRanks) {
  const TestFolder folder;
  const Values whole = matrices_trained_and_saved(2, ShardingStrategy::kFullShard, folder / "whole", 0, 6);
  const std::string path = folder / "parts";
  const Values saved = matrices_trained_and_saved(2, ShardingStrategy::kNoShard, path, 0, 3);
  for (const int ranks : {3, 1, 2}) {  // each run loads the checkpoint of the run before
    EXPECT_TRUE(all_same_bits(matrices_trained_and_saved(ranks, ShardingStrategy::kFullShard, path, 3, 3), saved));
  }
  EXPECT_TRUE(all_same_bits(matrices_trained_and_saved(2, ShardingStrategy::kShardGradients, path, 3, 6), whole));

  struct OtherShape final : MatrixOptimizer {
    std::vector<State> states(std::int64_t rows, std::int64_t) const override { return {{"left", {rows}}}; }
    void update(Matrix&) const override {}
  };
  EXPECT_THAT(error_of([&] {
                matrices_trained_and_saved(1, ShardingStrategy::kNoShard, path, 6, 6, std::make_shared<OtherShape>());
              }),
              HasSubstr("the optimizer keeps [64] of \"left\" for it, and the checkpoint has [64, 64]"));
}

/// Returns the error of an Engine with `rule` and `adjust`, either when it is made or in a step.
std::string error_with(Rule rule, const Adjust& adjust = with_own_matrix) {
  return error_of([&] {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      MatrixSession session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), rule);
      session.train(0);
    });
  });
}

/// A rule that has `states` and does nothing.
struct Idle : MatrixOptimizer {
  explicit Idle(std::vector<State> states = {}) : all(std::move(states)) {}
  std::vector<State> states(std::int64_t, std::int64_t) const override { return all; }
  void update(Matrix&) const override {}
  const std::vector<State> all;
};

TEST(MatrixOptimizer, WrongStatesAndThrownErrorsAreNamed) {
  const auto with_states = [](std::vector<State> states) { return std::make_shared<Idle>(std::move(states)); };
  EXPECT_THAT(error_with(with_states({{"a", {1}}, {"a", {1}}})),
              HasSubstr("MatrixOptimizer, parameter blocks.0.up.weight: \"a\" is no name for a state"));
  for (const char* taken : {"ema", "master", "value", "buffer", "item", "generator", "gpu_generator", "factors",
                            "outer_momentum", "a.b", "a|b", ""})
    EXPECT_THAT(error_with(with_states({{taken, {1}}})), HasSubstr(c10::str("\"", taken, "\" is no name for a state")));
  EXPECT_THAT(error_with(with_states({{"a", {-1}}})), HasSubstr("wants sizes of 0 and more, got [-1]"));
  EXPECT_THAT(error_with(nullptr), HasSubstr("optimizer.type is own_matrix, and the program brings no rule"));
  EXPECT_THAT(error_with(std::make_shared<OwnMuon>(), with_muon), HasSubstr("optimizer.type is muon"));
  struct OtherState final : Idle {
    OtherState() : Idle({{"a", {2}}}) {}
    void update(Matrix& m) const override { m.states[0] = m.states[0] + 1; }
  };
  EXPECT_THAT(error_with(std::make_shared<OtherState>()), HasSubstr("the state \"a\" is another tensor"));
  struct Sums final : Idle {
    void update(Matrix& m) const override { m.parameter = m.parameter.sum(); }
  };
  EXPECT_THAT(error_with(std::make_shared<Sums>()), HasSubstr("after update, wanted ["));
  struct Throws final : Idle {
    void update(Matrix&) const override { throw std::runtime_error("a rule with a toothache"); }
  };
  EXPECT_THAT(error_with(std::make_shared<Throws>()), HasSubstr("a rule with a toothache"));
  struct Refuses final : MatrixOptimizer {
    std::vector<State> states(std::int64_t, std::int64_t) const override { return {}; }
    void update(Matrix&) const override { throw Error(ExitCode::kUsage, "no matrix of mine"); }
  };
  EXPECT_THAT(error_with(std::make_shared<Refuses>()), ContainsRegex("parameter [a-z0-9._]*weight: no matrix of mine"));
}

TEST(MatrixOptimizer, UnsupportedKeysAreRefused) {
  const auto error_under = [](const Adjust& adjust) {
    return error_with(std::make_shared<OwnMuon>(), [&](Strategy& s) {
      with_own_matrix(s);
      adjust(s);
    });
  };
  EXPECT_THAT(error_under([](Strategy& s) { s.optimizer.state_dtype = StateDType::kBF16; }), HasSubstr("state_dtype"));
}

}  // namespace matrix_optimizer_test
}  // namespace tessera::testing
