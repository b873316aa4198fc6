// Tests LAMB and LARS in an Engine. Their numbers are those of the papers' formulas, and all strategies give the same
// bits, in memory and on disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace layerwise_test {

using ::testing::HasSubstr;

constexpr std::size_t kSteps = 20;

struct Rule {
  std::string name;
  OptimizerConfig config;
};

Rule lamb() { return {"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}}; }

Rule lars(double momentum, bool nesterov) {
  return {"lars, momentum " + std::to_string(momentum),
          {.type = OptimizerType::kLars,
           .lr = 0.5,
           .weight_decay = 0.1,
           .momentum = momentum,
           .nesterov = nesterov,
           .trust_coefficient = 0.02}};
}

std::vector<Rule> rules() { return {lamb(), lars(0.9, false), lars(0.9, true), lars(0, false)}; }

/// Sets the rule with three groups: vectors without decay, whose rates do not depend on norms; blocks with much decay
/// at half the rate; and all other parameters.
void with_rule(Strategy& s, const Rule& rule) {
  const StateDType states = s.optimizer.state_dtype;
  s.optimizer = rule.config;
  s.optimizer.state_dtype = states;
  s.optimizer.groups = {
      {.match = {"*"}, .max_dim = 1, .weight_decay = 0.0, .layer_adaptation = false},
      {.match = {"blocks.*.up.weight", "blocks.*.down.weight"}, .lr_ratio = 0.5, .weight_decay = 0.3}};
  s.gradient_clipping = 0.05;
}

/// Computes the formulas once more, in fp64.
struct Plain {
  const OptimizerConfig& config;
  const double clipping;
  struct Parameter {
    at::Tensor master, first, second;
  };
  std::map<std::string, Parameter> parameters = {};
  std::int64_t steps = 0;

  void step(torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    ++steps;
    double squares = 0;
    for (const auto& item : module.named_parameters())
      squares += item.value().grad().to(at::kDouble).square().sum().item<double>();
    const double clip = clipping > 0 ? std::min(1.0, clipping / (std::sqrt(squares) + 1e-6)) : 1;
    for (const auto& item : module.named_parameters()) {
      const bool is_block = item.key().starts_with("blocks."), is_vector = item.value().dim() == 1;
      const at::Tensor now = item.value().to(at::kDouble);
      Parameter& p = parameters.try_emplace(item.key(), now, at::zeros_like(now), at::zeros_like(now)).first->second;
      const double decay = is_vector ? 0 : is_block ? 0.3 : double{config.weight_decay};
      const double beta1 = config.beta1, beta2 = config.beta2, eps = config.eps;
      double rate = config.lr * (is_block && !is_vector ? 0.5 : 1);
      const at::Tensor gradient = item.value().grad().to(at::kDouble) * clip;
      const auto norm = [](const at::Tensor& tensor) { return tensor.norm().item<double>(); };
      const double weights = norm(p.master);
      if (config.type == OptimizerType::kLamb) {
        p.first = beta1 * p.first + (1 - beta1) * gradient;
        p.second = beta2 * p.second + (1 - beta2) * gradient * gradient;
        const at::Tensor first = p.first / (1 - std::pow(beta1, steps));
        const at::Tensor second = p.second / (1 - std::pow(beta2, steps));
        const at::Tensor direction = first / (second.sqrt() + eps) + decay * p.master;
        if (!is_vector && weights > 0 && norm(direction) > 0) rate *= weights / norm(direction);
        p.master = p.master - rate * direction;
      } else {
        if (!is_vector && weights > 0 && norm(gradient) > 0) {
          rate *= config.trust_coefficient * weights / (norm(gradient) + decay * weights + eps);
        }
        const at::Tensor share = rate * (gradient + decay * p.master);
        p.first = config.momentum * p.first + share;
        p.master = p.master - (config.nesterov ? config.momentum * p.first + share : p.first);
      }
      at::Tensor(item.value()).copy_(p.master);
    }
  }
};

Values train_plainly(const Rule& rule) {
  Tiny model = make_tiny({}, /*deferred=*/false);
  Strategy strategy;
  with_rule(strategy, rule);
  Plain plain{strategy.optimizer, strategy.gradient_clipping};
  const auto batches = make_batches(6, 24, 5, TinyOptions{}.vocab);
  for (std::size_t i = 0; i < kSteps; ++i) {
    model->zero_grad();
    model->forward(batches[i % 6].tokens, batches[i % 6].targets).backward();
    plain.step(*model);
  }
  return values_of(*model);
}

TEST(Layerwise, LambAndLarsEqualThePapersFormulas) {
  for (const Rule& rule : rules()) {
    const Values wanted = train_plainly(rule);
    for (const int ranks : {1, 2, 3}) {
      // Several ranks add up gradients in another order than one process does.
      const double tolerance = ranks == 1 ? 2e-6 : 1e-5;
      on_each_placement(
          ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            const Values values = trained(mesh, strategy, kSteps);
            if (mesh.rank() == 0) expect_close(values, wanted, tolerance, rule.name);
          },
          [&](Strategy& s) { with_rule(s, rule); });
    }
  }
}

TEST(Layerwise, HasTheSameBitsUnderEveryStrategyInMemoryAndOnDisk) {
  const Rule rules[] = {lamb(), lars(0.9, true)};
  MadeOnce<Values> firsts;
  for (const auto& each : pairwise_of(rules, kOneOfEachKind, kInMemoryAndBelow, kOnePerPlacement, std::array{2, 3})) {
    const Rule& rule = std::get<0>(each);
    const Kept& kept = std::get<1>(each);
    const Below* const below = std::get<2>(each);
    const Placed& placed = std::get<3>(each);
    const int ranks = std::get<4>(each);
    const auto train = [&](const Placed& on, const Below* lying) {
      const auto adjust = [&](Strategy& s) {
        adjusted_to(kept, lying)(s);
        with_rule(s, rule);
        s.ema.decay = 0.9;
      };
      const Strategy strategy = strategy_for(on, adjust, kept.param);
      return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) { return trained(mesh, strategy, 5, kAwkward); });
    };
    const std::string of = std::string(rule.name) + ", " + name_of(kept) + " on " + std::to_string(ranks) + " ranks";
    const Values& first = firsts(of, [&] { return train(ShardingStrategy::kNoShard, nullptr); });
    EXPECT_TRUE(all_same_bits(train(placed, below), first))
        << of << ", " << name_of(placed) << (below ? ", below" : "");
  }
}

TEST(Layerwise, HasTheSameBitsOnAMeshOfTwoAxes) {
  for (const Rule& rule : {lamb(), lars(0.9, false)}) {
    FirstValues first;
    for (const bool over_world : {false, true}) {
      for (const bool shared : {false, true}) {
        run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
          Strategy strategy =
              strategy_for(Placed(ShardingStrategy::kHybridShard, shared), [&](Strategy& s) { with_rule(s, rule); });
          strategy.mesh = {2, 2};
          strategy.optimizer.shard_over_world = over_world;
          EXPECT_TRUE(first.same_bits(mesh, trained(mesh, strategy, 4, kAwkward)))
              << rule.name << ", over world " << over_world << ", shared " << shared;
        });
      }
    }
  }
}

// A step passes over the records twice, first forward and then backward. Records that are still in memory are not moved
// again.
TEST(Layerwise, DiskTrafficEqualsThePlan) {
  static constexpr Below kBelow[] = {{0, 1, 1, 4096, 0, 1}, {1, 1, 1, 4096, 16384, 2}, {1, 0, 0, 4096, 0, 1}};
  for (const Rule& rule : {lamb(), lars(0.9, true)}) {
    for (const Below& below : kBelow) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
          const auto adjust = [&](Strategy& s) {
            with_rule(s, rule);
            put_below(s, below);
          };
          Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust, dtype), kWide);
          expect_planned_disk_traffic(session, rule.name + ", " + std::string(name_of(dtype)));
        });
      }
    }
  }
}

TEST(Layerwise, FreezingAndASecondEngineKeepTheBits) {
  for (const Rule& rule : {lamb(), lars(0.9, false)}) {
    FirstValues frozen, again;
    on_each_placement(
        2,
        [&](const Mesh& mesh, const Strategy& strategy) {
          const Values one = trained_with_weights_frozen_for_a_while(mesh, strategy);
          const Values two = trained_by_two_engines(mesh, strategy);
          if (mesh.rank() != 0) return;
          EXPECT_TRUE(frozen.same_bits(one)) << rule.name;
          EXPECT_TRUE(again.same_bits(two)) << rule.name;
        },
        [&](Strategy& s) { with_rule(s, rule); });
  }
}

TEST(Layerwise, ResumedRunHasTheSameBits) {
  for (const Rule& rule : {lamb(), lars(0.9, false)}) {
    const TestFolder folder;
    const Adjust adjust = [&](Strategy& s) { with_rule(s, rule); };
    const Values whole = train_and_save(2, ShardingStrategy::kFullShard, folder / "whole", 6, adjust);
    const std::string parts = folder / "parts";
    const Values half = train_and_save(2, ShardingStrategy::kShardGradients, parts, 3, adjust);
    EXPECT_TRUE(all_same_bits(train_and_save(3, ShardingStrategy::kFullShard, parts, 0, adjust), half)) << rule.name;
    EXPECT_TRUE(all_same_bits(train_and_save(2, ShardingStrategy::kFullShard, parts, 3, adjust), whole)) << rule.name;
  }
}

/// A vector of zeros has norm 0, but the update must change it.
TEST(Layerwise, ZeroWeightsAreUpdated) {
  for (const Rule& rule : {lamb(), lars(0.9, false)}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const auto adjust = [&](Strategy& s) {
        with_rule(s, rule);
        s.optimizer.groups.clear();
      };
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust));
      {
        const Gathered all(session.engine, Gathered::kWrite);
        const at::NoGradGuard no_grad;
        for (at::Tensor parameter : session.model->parameters()) {
          if (parameter.dim() == 1) parameter.zero_();
        }
      }
      for (std::size_t i = 0; i < 2; ++i) session.train(i);
      for (const auto& [name, value] : session.values()) {
        EXPECT_TRUE(value.isfinite().all().item<bool>()) << rule.name << ": " << name;
        EXPECT_GT(value.abs().max().item<float>(), 0) << rule.name << ": " << name;
      }
    });
  }
}

TEST(Layerwise, UnsupportedKeysAreRefused) {
  const auto error_with = [](const Rule& rule, const Adjust& adjust) {
    return error_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) {
                          with_rule(s, rule);
                          adjust(s);
                        }));
      });
    });
  };
  EXPECT_THAT(error_with(lars(0.9, false),
                         [](Strategy& s) {
                           s.gradient_clipping = 0;
                           s.gradient_clip_value = 1;
                         }),
              HasSubstr("lars divides by the gradient's norm"));
  EXPECT_THAT(error_with(lamb(), [](Strategy& s) { s.optimizer.type = OptimizerType::kAdamW; }),
              HasSubstr("has layer_adaptation, which adamw does not have"));
}

}  // namespace layerwise_test
}  // namespace tessera::testing
