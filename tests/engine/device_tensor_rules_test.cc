// Rules of whole tensors, Adafactor and a program's own, on an emulated GPU: the CPU's bits, however late the device is. Adafactor's kernels have
// them on any GPU; what a program does is LibTorch's on the CPU there, too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tests/support/own_muon.h"
#include "tests/support/session.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

/// With groups whose rates and decay are their own.
Strategy with_rule(OptimizerType type, Strategy strategy) {
  strategy.optimizer = {.type = type, .lr = 1e-2, .weight_decay = 0.1};
  if (type == OptimizerType::kOwnMatrix) strategy.optimizer.eps = 1e-3;
  strategy.optimizer.groups = {
      {.name = "vectors", .max_dim = 1, .lr_ratio = 2, .weight_decay = 0.0},
      {.name = "downs", .match = {"blocks.*.down.weight"}, .lr_ratio = 0.3, .weight_decay = 0.3}};
  return strategy;
}

OwnRules rules_for(OptimizerType type) {
  return type == OptimizerType::kOwnMatrix ? OwnRules::of(std::make_shared<OwnMuon>()) : OwnRules();
}

struct Case {
  OptimizerType type;
  DType dtype;
  int ranks;
  std::int64_t accumulation;
};

constexpr OptimizerType kTypes[] = {OptimizerType::kAdafactor, OptimizerType::kOwnMatrix};

class DeviceTensorRules : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceTensorRules, GiveTheCpusBitsUnderEveryStrategy) {
  const auto [type, dtype, ranks, accumulation] = GetParam();
  TrainOptions plain = short_run(), awkward = short_run();
  plain.own_rules = awkward.own_rules = rules_for(type);
  awkward.model = kOfEveryKind;
  const auto of = [&, type = type, dtype = dtype, accumulation = accumulation](const Placed& placed, double decay) {
    Strategy strategy = with_rule(type, strategy_of(placed, dtype, accumulation));
    strategy.ema.decay = decay;
    return strategy;
  };
  for (const Placed& placed : kStrategies) {
    expect_same_on_gpus({.ranks = ranks}, of(placed, 0), plain, name_of(placed));
    expect_same_on_gpus({.ranks = ranks}, of(placed, 0.75), awkward, name_of(placed) + ", awkward, with averages");
  }
  if (ranks < 4) return;
  for (const bool world : {false, true}) {
    Strategy hybrid = of(ShardingStrategy::kHybridShard, 0.75);
    hybrid.optimizer.shard_over_world = world;
    expect_same_on_gpus({.ranks = 4, .hosts = 2}, hybrid, plain, world ? "hybrid over the world" : "hybrid");
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const OptimizerType type : kTypes) {
    for (const auto& [dtype, ranks, accumulation] : {std::tuple{DType::kF32, 1, 1},
                                                     {DType::kBF16, 1, 3},
                                                     {DType::kF16, 2, 1},
                                                     {DType::kBF16, 3, 1},
                                                     {DType::kF32, 4, 1}}) {
      all.push_back({type, dtype, ranks, accumulation});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTensorRules, ::testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(name_of(info.param.type)) + "_" + std::string(name_of(info.param.dtype)) + "_ranks" +
         std::to_string(info.param.ranks);
});

TEST(DeviceTensorRules, ParametersMayTakePartInSomeSteps) {
  for (const OptimizerType type : kTypes) {
    expect_left_out_as_on_the_cpu([&](Strategy strategy) { return with_rule(type, std::move(strategy)); },
                                  name_of(type), rules_for(type));
  }
}

TEST(DeviceTensorRules, GradientsAreClippedByValueAsOnTheCpu) {
  for (const OptimizerType type : kTypes) {
    Strategy strategy = with_rule(type, strategy_of(ShardingStrategy::kShardGradients, DType::kBF16, 1));
    strategy.gradient_clipping = 0;
    strategy.gradient_clip_value = 1e-3;
    TrainOptions options = short_run();
    options.own_rules = rules_for(type);
    expect_same_on_gpus({.ranks = 2}, strategy, options, name_of(type));
  }
}

TEST(DeviceTensorRules, WhatIsDoneAroundStepsIsDoneAsOnTheCpu) {
  for (const OptimizerType type : kTypes) {
    expect_led_as_on_the_cpu([&](Strategy strategy) { return with_rule(type, std::move(strategy)); }, name_of(type),
                             rules_for(type));
  }
}

TEST(DeviceTensorRules, SaveAndLoadCheckpointsAsTheCpuDoes) {
  for (const OptimizerType type : kTypes) {
    Strategy strategy = with_rule(type, scheduled(ShardingStrategy::kFullShard, DType::kBF16));
    strategy.ema.decay = 0.75;
    expect_checkpoints_as_on_the_cpu(2, strategy, name_of(type), rules_for(type));
    strategy.checkpoint.async = true;
    expect_checkpoints_as_on_the_cpu(2, strategy, name_of(type) + ", saved beside training", rules_for(type));
  }
}

TEST(DeviceTensorRules, MistakesAreNamed) {
  struct Elsewhere final : MatrixOptimizer {
    std::vector<State> states(std::int64_t, std::int64_t) const override { return {}; }
    void update(Matrix& m) const override { m.parameter = m.parameter.to(at::kMeta); }
  };
  const EmulatedGpus gpus;
  EXPECT_THAT(error_of([&] {
                run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
                  Session session(
                      mesh,
                      with_rule(OptimizerType::kOwnMatrix, strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1)),
                      kTwoBlocks, OwnRules::of(std::make_shared<Elsewhere>()));
                  session.train(0).wait();
                });
              }),
              HasSubstr("on meta"));
}

}  // namespace
}  // namespace tessera::testing
