// Tests rules of whole tensors on an emulated GPU: Adafactor, and a program's own rule. They have the CPU's bits,
// however late the device is. Adafactor's kernels have these bits on any GPU. LibTorch runs a program's operators on
// the CPU, even with an emulated GPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/own_muon.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_tensor_rules_test {

using ::testing::HasSubstr;

/// Gives the strategy the rule, and groups with their own rates and decay.
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

constexpr OptimizerType kTypes[] = {OptimizerType::kAdafactor, OptimizerType::kOwnMatrix};

struct Case {
  DType dtype;
  int ranks;
  std::int64_t accumulation;
};
constexpr Case kCases[] = {
    {DType::kF32, 1, 1}, {DType::kBF16, 1, 3}, {DType::kF16, 2, 1}, {DType::kBF16, 3, 1}, {DType::kF32, 4, 1}};

class DeviceTensorRules : public ::testing::TestWithParam<OptimizerType> {};
INSTANTIATE_TEST_SUITE_P(All, DeviceTensorRules, ::testing::ValuesIn(kTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(DeviceTensorRules, GiveTheCpusBitsUnderEveryStrategy) {
  std::vector<std::pair<Placed, bool>> all = {{ShardingStrategy::kHybridShard, false},
                                              // If the second value is true, optimizer state is cut over the world.
                                              {ShardingStrategy::kHybridShard, true}};
  for (const Placed& placed : kStrategies) all.emplace_back(placed, false);
  const auto is_hybrid = [](const std::pair<Placed, bool>& where) {
    return where.first.kind == ShardingStrategy::kHybridShard;
  };
  const auto exists = [&](OptimizerType, const Case& on, const std::pair<Placed, bool>& where, bool is_awkward) {
    return !is_hybrid(where) || (on.ranks == 4 && !is_awkward);
  };
  for (const auto& [type, on, where, is_awkward] :
       pairwise_where(exists, kTypes, kCases, all, std::array{false, true})) {
    if (type != GetParam()) continue;
    TrainOptions options = short_run();
    options.own_rules = rules_for(type);
    if (is_awkward) options.model = kOfEveryKind;
    Strategy strategy = with_rule(type, strategy_of(where.first, on.dtype, on.accumulation));
    strategy.optimizer.shard_over_world = where.second;
    if (is_awkward || is_hybrid(where)) strategy.ema.decay = 0.75;
    expect_same_on_gpus({.ranks = on.ranks, .hosts = is_hybrid(where) ? 2 : 1}, strategy, options,
                        name_of(where.first) + (where.second ? " over the world" : "") + ", " +
                            std::string(name_of(on.dtype)) + " on " + std::to_string(on.ranks) + " ranks" +
                            (is_awkward ? ", awkward, with averages" : ""));
  }
}

TEST(DeviceTensorRules, ParametersUnusedInSomeStepsGiveTheCpusBits) {
  for (const OptimizerType type : kTypes) {
    expect_left_out_as_on_the_cpu([&](Strategy strategy) { return with_rule(type, std::move(strategy)); },
                                  name_of(type), rules_for(type));
  }
}

TEST(DeviceTensorRules, GradientsClippedByValueGiveTheCpusBits) {
  for (const OptimizerType type : kTypes) {
    Strategy strategy = with_rule(type, strategy_of(ShardingStrategy::kShardGradients, DType::kBF16, 1));
    strategy.gradient_clipping = 0;
    strategy.gradient_clip_value = 1e-3;
    TrainOptions options = short_run();
    options.own_rules = rules_for(type);
    expect_same_on_gpus({.ranks = 2}, strategy, options, name_of(type));
  }
}

TEST(DeviceTensorRules, CallsAroundStepsGiveTheCpusBits) {
  for (const OptimizerType type : kTypes) {
    expect_led_as_on_the_cpu([&](Strategy strategy) { return with_rule(type, std::move(strategy)); }, name_of(type),
                             rules_for(type));
  }
}

TEST(DeviceTensorRules, CheckpointsEqualTheCpus) {
  for (const OptimizerType type : kTypes) {
    Strategy strategy = with_rule(type, scheduled(ShardingStrategy::kFullShard, DType::kBF16));
    strategy.ema.decay = 0.75;
    expect_checkpoints_as_on_the_cpu(2, strategy, name_of(type), rules_for(type));
    strategy.checkpoint.async = true;
    expect_checkpoints_as_on_the_cpu(2, strategy, name_of(type) + ", saved beside training", rules_for(type));
  }
}

TEST(DeviceTensorRules, ParameterMovedToAnotherDeviceIsNamed) {
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

}  // namespace device_tensor_rules_test
}  // namespace tessera::testing
