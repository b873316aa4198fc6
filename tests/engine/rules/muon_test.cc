// Tests Muon in an Engine. It updates whole matrices, in whatever way they are cut over the ranks. Its numbers are
// those of its formula, and all strategies give the same bits, in memory and on disk.

#include <ATen/ops/linalg_svdvals.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "engine/step/rules/orthogonalize.h"
#include "sharding/layout/matrix_deal.h"
#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace muon_test {

using ::testing::HasSubstr;

constexpr std::size_t kSteps = 20;

void with_muon(Strategy& s) {
  const StateDType states = s.optimizer.state_dtype;
  s.optimizer = {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1};
  s.optimizer.muon.adjust_lr = MuonLrAdjustment::kMatchRmsAdamW;
  s.optimizer.state_dtype = states;
  s.gradient_clipping = 0;
}

// ---- The formula, written down once more with LibTorch's operators --------------------------------------------------

at::Tensor orthogonal(const at::Tensor& matrix, std::int64_t steps) {
  const bool is_tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = (is_tall ? matrix.t() : matrix).to(at::kDouble);
  x = x / x.norm().clamp_min(1e-7);
  for (std::int64_t i = 0; i < steps; ++i) {
    const at::Tensor gram = x.mm(x.t());
    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram.mm(gram)).mm(x);
  }
  return (is_tall ? x.t() : x).to(at::kFloat);
}

/// Updates all matrices with Muon, except the embedding's, and all other parameters with AdamW. The head's matrix may
/// be updated with AdamW too.
struct PlainMuon {
  const OptimizerConfig& config;
  const bool head_has_adamw;
  struct Moments {
    at::Tensor first, second;
  };
  std::map<std::string, Moments> moments = {};
  std::int64_t steps = 0;

  bool is_matrix(const std::string& name, const at::Tensor& parameter) const {
    if (parameter.dim() != 2 || name.starts_with("embedding")) return false;
    return name != "head" || !head_has_adamw;
  }

  void step(torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    ++steps;
    for (auto& item : module.named_parameters()) {
      at::Tensor parameter = item.value();
      const at::Tensor gradient = parameter.grad();
      Moments& m = moments.try_emplace(item.key(), at::zeros_like(parameter), at::zeros_like(parameter)).first->second;
      parameter.mul_(1 - config.lr * config.weight_decay);
      if (is_matrix(item.key(), parameter)) {
        m.first.lerp_(gradient, 1 - config.muon.momentum);
        const at::Tensor direction = config.muon.nesterov ? gradient.lerp(m.first, config.muon.momentum) : m.first;
        const double rows = static_cast<double>(parameter.size(0)), columns = static_cast<double>(parameter.size(1));
        const double factor = config.muon.adjust_lr == MuonLrAdjustment::kOriginal
                                  ? std::sqrt(std::max(1.0, rows / columns))
                                  : 0.2 * std::sqrt(std::max(rows, columns));
        parameter.sub_(orthogonal(direction, config.muon.ns_steps), config.lr * factor);
        continue;
      }
      m.first.lerp_(gradient, 1 - config.beta1);
      m.second.mul_(double{config.beta2}).addcmul_(gradient, gradient, 1 - config.beta2);
      const double correction = 1 - std::pow(config.beta1, steps), root = std::sqrt(1 - std::pow(config.beta2, steps));
      parameter.sub_(m.first / ((m.second.sqrt() / root) + double{config.eps}), config.lr / correction);
    }
  }
};

Values train_plainly(const OptimizerConfig& config) {
  Tiny model = make_tiny({}, /*deferred=*/false);
  PlainMuon muon{config, !config.groups.empty()};
  const auto batches = make_batches(6, 24, 5, TinyOptions{}.vocab);
  for (std::size_t i = 0; i < kSteps; ++i) {
    model->zero_grad();
    model->forward(batches[i % 6].tokens, batches[i % 6].targets).backward();
    muon.step(*model);
  }
  return values_of(*model);
}

/// Checks that matrices differ by at most `tolerance` times their norm.
void expect_close_by_norm(const Values& got, const Values& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double distance = (got[i].second - wanted[i].second).norm().item<double>();
    EXPECT_LE(distance, tolerance * (1e-3 + wanted[i].second.norm().item<double>())) << what << ": " << got[i].first;
  }
}

TEST(Orthogonalize, SingularValuesBecomeAboutOne) {
  at::manual_seed(1);
  for (const MatrixShape shape : {MatrixShape{8, 8}, {5, 40}, {40, 5}, {1, 7}, {33, 17}}) {
    at::Tensor matrix = at::randn({shape.rows, shape.columns});
    const at::Tensor wanted = orthogonal(matrix, 5);
    const std::int64_t shorter = std::min(shape.rows, shape.columns);
    at::Tensor work =
        at::empty({2 * MatrixDeal::in_whole_lines(matrix.numel()) + 2 * MatrixDeal::in_whole_lines(shorter * shorter)});
    orthogonalize(matrix.data_ptr<float>(), shape, 5, {work.data_ptr<float>(), static_cast<std::size_t>(work.numel())});
    EXPECT_LT((matrix - wanted).abs().max().item<float>(), 1e-3f);
    const at::Tensor values = at::linalg_svdvals(matrix);
    EXPECT_GT(values.min().item<float>(), 0.3f);
    EXPECT_LT(values.max().item<float>(), 1.4f);
  }
}

/// Numbers have 8 bits of precision, and 15 products follow each other.
TEST(Orthogonalize, ComputesInBf16) {
  at::manual_seed(1);
  for (const MatrixShape shape : {MatrixShape{64, 64}, {48, 200}, {200, 48}}) {
    at::Tensor matrix = at::randn({shape.rows, shape.columns}) * 1e-4;
    const at::Tensor wanted = orthogonal(matrix, 5);
    const std::int64_t shorter = std::min(shape.rows, shape.columns);
    at::Tensor work =
        at::empty({2 * MatrixDeal::in_whole_lines(matrix.numel()) + 2 * MatrixDeal::in_whole_lines(shorter * shorter)});
    const std::span<float> room{work.data_ptr<float>(), static_cast<std::size_t>(work.numel())};
    orthogonalize(matrix.data_ptr<float>(), shape, 5, room, DType::kBF16);
    EXPECT_LT(((matrix - wanted).norm() / wanted.norm()).item<float>(), 0.05f);
    EXPECT_GT((matrix - wanted).abs().max().item<float>(), 1e-5f) << "computed in fp32";
    EXPECT_TRUE(at::equal(matrix, matrix.to(at::kBFloat16).to(at::kFloat)));
  }
}

TEST(Orthogonalize, ZeroMatrixStaysZero) {
  at::Tensor matrix = at::zeros({3, 5}), work = at::empty({64 + 32});
  orthogonalize(matrix.data_ptr<float>(), {3, 5}, 5, {work.data_ptr<float>(), 96});
  EXPECT_EQ(matrix.abs().max().item<float>(), 0.0f);
}

TEST(Muon, EqualsItsFormulaInPlainLibTorch) {
  using enum MuonLrAdjustment;
  struct Case {
    MuonConfig muon;
    bool head_has_adamw;
  };
  const Case cases[] = {{{.adjust_lr = kMatchRmsAdamW}, false},
                        {{.momentum = 0.9, .nesterov = false, .ns_steps = 6, .adjust_lr = kOriginal}, true},
                        {{.momentum = 0.0, .adjust_lr = kMatchRmsAdamW}, true}};
  for (const Case& c : cases) {
    const auto adjust = [&](Strategy& s) {
      with_muon(s);
      s.optimizer.muon = c.muon;
      if (c.head_has_adamw) s.optimizer.groups = {{.match = {"head"}, .type = OptimizerType::kAdamW}};
    };
    const Values wanted = train_plainly(strategy_for(ShardingStrategy::kNoShard, adjust).optimizer);
    for (const int ranks : {1, 2, 3}) {
      on_placements(
          kInMemory, ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            const Values values = trained(mesh, strategy, kSteps);
            if (mesh.rank() == 0) expect_close_by_norm(values, wanted, 1e-4, std::to_string(ranks) + " ranks");
          },
          adjust);
    }
  }
}

TEST(Muon, HasTheSameBitsUnderEveryStrategy) {
  for (const Kept& kept : kOneOfEachKind) {
    for (const int ranks : {2, 3, 4}) {
      FirstValues first;
      on_placements(
          kInMemory, ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            EXPECT_TRUE(first.same_bits(mesh, trained(mesh, strategy, 5, kAwkward)))
                << name_of(kept) << ", " << ranks << " ranks";
          },
          [&](Strategy& s) {
            adjusted_to(kept, nullptr)(s);
            with_muon(s);
            s.ema.decay = 0.9;
            s.gradient_accumulation = 1;
            if (ranks == 3) s.optimizer.muon.ns_dtype = DType::kBF16;
          },
          kept.param);
    }
  }
}

TEST(Muon, HasTheSameBitsOnDisk) {
  for (const Kept& kept : kOneOfEachKind) {
    FirstValues first;
    for (const Below* below : kInMemoryAndBelow) {
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, kAwkward);
            for (std::size_t i = 0; i < 5; ++i) {
              const StepResult step = session.train(i);
              EXPECT_EQ(step.planned, step.allocated) << name_of(kept);
            }
            EXPECT_TRUE(first.same_bits(mesh, session.values()))
                << name_of(kept) << (below ? ", below" : ", in memory");
          },
          [&](Strategy& s) {
            adjusted_to(kept, below)(s);
            with_muon(s);
            s.ema.decay = 0.9;
          },
          kept.param);
    }
  }
}

TEST(Muon, DiskTrafficEqualsThePlan) {
  static constexpr Below kBelow[] = {
      {0, 1, 1, 4096, 0, 1}, {1, 1, 1, 4096, 16384, 2}, {0, 0, 1, 4096, 0, 16}, {0, 1, 0.3, 16384, 0, 1}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Below& below : kBelow) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        const auto adjust = [&](Strategy& s) {
          with_muon(s);
          put_below(s, below);
        };
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust, dtype), kWide);
        expect_planned_disk_traffic(session,
                                    std::string(name_of(dtype)) + ", queue " + std::to_string(below.queue_depth));
      });
    }
  }
}

TEST(Muon, HasTheSameBitsOnAMeshOfTwoAxes) {
  std::optional<Values> wanted;
  for (const bool over_world : {false, true}) {
    for (const bool shared : {false, true}) {
      run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
        Strategy strategy = strategy_for(Placed(ShardingStrategy::kHybridShard, shared), with_muon);
        strategy.mesh = {2, 2};
        strategy.optimizer.shard_over_world = over_world;
        const Values values = trained(mesh, strategy, 4, kAwkward);
        if (mesh.rank() != 0) return;
        if (!wanted) wanted = values;
        EXPECT_TRUE(all_same_bits(values, *wanted)) << "over world " << over_world << ", shared " << shared;
      });
    }
  }
}

TEST(Muon, FreezingForAWhileKeepsTheBits) {
  FirstValues first;
  on_placements(
      kInMemory, 2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        EXPECT_TRUE(first.same_bits(mesh, trained_with_weights_frozen_for_a_while(mesh, strategy)));
      },
      with_muon);
}

TEST(Muon, SecondEngineKeepsTheBits) {
  FirstValues first;
  on_placements(
      kInMemory, 2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        EXPECT_TRUE(first.same_bits(mesh, trained_by_two_engines(mesh, strategy)));
      },
      with_muon);
}

// ---- Checkpoints ----------------------------------------------------------------------------------------------------

TEST(MuonCheckpoint, ResumedRunHasTheSameBits) {
  const TestFolder folder;
  const Values whole = train_and_save(2, ShardingStrategy::kFullShard, folder / "whole", 6, with_muon);
  const std::string parts = folder / "parts";
  train_and_save(2, ShardingStrategy::kShardGradients, parts, 3, with_muon);
  const Placed shared(ShardingStrategy::kFullShard, true);
  EXPECT_TRUE(all_same_bits(train_and_save(2, shared, parts, 3, with_muon), whole));
}

TEST(MuonCheckpoint, OtherNumbersOfRanksLoadTheSameValues) {
  const TestFolder folder;
  const std::string path = folder / "saved";
  const Values saved = train_and_save(2, ShardingStrategy::kFullShard, path, 3, with_muon);
  for (const int ranks : {3, 1, 4, 2}) {
    const Values loaded = train_and_save(ranks, ShardingStrategy::kFullShard, path, 0, with_muon);
    EXPECT_TRUE(all_same_bits(loaded, saved)) << ranks;
  }
}

TEST(MuonCheckpoint, AnotherRuleForAParameterIsRefusedByName) {
  const TestFolder folder;
  const std::string path = folder / "saved";
  train_and_save(1, ShardingStrategy::kNoShard, path, 1, with_muon);
  const auto other = [](Strategy& s) {
    with_muon(s);
    s.optimizer.groups = {{.match = {"blocks.1.up.weight"}, .type = OptimizerType::kAdamW}};
  };
  const std::string error = error_of([&] { train_and_save(1, ShardingStrategy::kNoShard, path, 1, other); });
  EXPECT_THAT(error, HasSubstr("parameter \"blocks.1.up.weight\": the optimizer keeps \"exp_avg\" for it"));
  EXPECT_THAT(error, HasSubstr("momentum_buffer"));
}

// ---- What Muon cannot do --------------------------------------------------------------------------------------------

TEST(Muon, UnsupportedKeysAreRefused) {
  const auto error_with = [](const Adjust& adjust) {
    return error_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) {
                          with_muon(s);
                          adjust(s);
                        }));
      });
    });
  };
  EXPECT_THAT(error_with([](Strategy& s) { s.optimizer.groups = {{.match = {"head"}, .type = OptimizerType::kSgd}}; }),
              HasSubstr("/optimizer/groups/0/type: must be one of adamw, muon, own_matrix"));
  EXPECT_THAT(
      error_with([](Strategy& s) { s.optimizer.groups = {{.match = {"head"}, .type = OptimizerType::kOwnMatrix}}; }),
      HasSubstr("group 0 has type own_matrix, where optimizer.type is muon"));
  EXPECT_THAT(error_with([](Strategy& s) {
                s.optimizer.type = OptimizerType::kAdamW;
                s.optimizer.groups = {{.match = {"head"}, .type = OptimizerType::kMuon}};
              }),
              HasSubstr("has type, which adamw does not have"));
}

}  // namespace muon_test
}  // namespace tessera::testing
