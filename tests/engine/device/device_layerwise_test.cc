// Tests LAMB and LARS on an emulated GPU: they have the CPU's bits, however late the device is.

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_layerwise_test {

struct Rule {
  const char* name;
  OptimizerConfig config;
};

const Rule kLamb{"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule kLars{"lars",
                 {.type = OptimizerType::kLars,
                  .lr = 0.5,
                  .weight_decay = 0.1,
                  .momentum = 0.9,
                  .nesterov = true,
                  .trust_coefficient = 0.02}};
const Rule kLarsWithoutMomentum{
    "lars without momentum", {.type = OptimizerType::kLars, .lr = 0.5, .weight_decay = 0.1, .trust_coefficient = 0.02}};

/// Gives the strategy the rule, with clipping, and with vectors in a group whose rates do not depend on norms.
Strategy with_rule(Strategy strategy, const Rule& rule) {
  const StateDType states = strategy.optimizer.state_dtype;
  strategy.optimizer = rule.config;
  strategy.optimizer.state_dtype = states;
  strategy.optimizer.groups = {
      {.name = "vectors", .max_dim = 1, .weight_decay = 0.0, .layer_adaptation = false},
      {.name = "downs", .match = {"blocks.*.down.weight"}, .lr_ratio = 0.3, .weight_decay = 0.3}};
  return strategy;
}

class DeviceLayerwise : public ::testing::TestWithParam<RuleCase> {};

TEST_P(DeviceLayerwise, GivesTheCpusBitsUnderEveryStrategy) {
  const auto [dtype, ranks, accumulation, states] = GetParam();
  std::vector<std::pair<Placed, bool>> all;  // true: states are cut over the world
  for (const Placed& placed : kStrategies) all.emplace_back(placed, false);
  if (ranks == 4) {
    for (const bool world : {false, true}) all.emplace_back(ShardingStrategy::kHybridShard, world);
  }
  const auto is_hybrid = [](const std::pair<Placed, bool>& where) {
    return where.first.kind == ShardingStrategy::kHybridShard;
  };
  const auto exists = [&](const Rule*, const std::pair<Placed, bool>& where, bool is_awkward) {
    return !is_hybrid(where) || !is_awkward;
  };
  for (const auto& [rule, where, is_awkward] :
       pairwise_where(exists, std::array{&kLamb, &kLars}, all, std::array{false, true})) {
    TrainOptions options = short_run();
    if (is_awkward) options.model = kOfEveryKind;
    Strategy strategy = strategy_of(where.first, dtype, accumulation);
    strategy.optimizer.state_dtype = states;
    strategy = with_rule(strategy, *rule);
    strategy.optimizer.shard_over_world = where.second;
    expect_same_on_gpus({.ranks = ranks, .hosts = is_hybrid(where) ? 2 : 1}, strategy, options,
                        std::string(rule->name) + ", " + name_of(where.first) +
                            (where.second ? " over the world" : "") + (is_awkward ? ", awkward" : ""));
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceLayerwise, kRuleCases, [](const auto& info) { return name_of(info.param); });

TEST(DeviceLayerwise, RulesWithoutStatesGroupsOrNormsGiveTheCpusBits) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
  expect_same_on_gpus({.ranks = 2}, with_rule(strategy, kLarsWithoutMomentum), short_run(), "without momentum");
  strategy = with_rule(strategy, kLamb);
  strategy.optimizer.groups.clear();
  strategy.gradient_clipping = 0;
  strategy.gradient_clip_value = 1e-3;
  expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "without groups, clipped by value");
  strategy.ema.decay = 0.75;
  expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "with averages");
}

/// LAMB exchanges norms once in a step.
TEST(DeviceLayerwise, ExchangeOfNormsCountsAsExposed) {
  const EmulatedGpus gpus;
  double seconds[2] = {};
  for (const bool lamb : {false, true}) {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1);
      Session session(mesh, lamb ? with_rule(strategy, kLamb) : strategy);
      StepResult result = session.train(0);
      result.wait();
      // the emulated clock counts one second for each wait
      if (mesh.rank() == 0) seconds[lamb] = result.communication_seconds;
    });
  }
  EXPECT_EQ(seconds[1], seconds[0] + 1);
}

TEST(DeviceLayerwise, CallsAroundStepsGiveTheCpusBits) {
  for (const Rule* rule : {&kLamb, &kLars})
    expect_led_as_on_the_cpu([&](Strategy strategy) { return with_rule(std::move(strategy), *rule); }, rule->name);
}

}  // namespace device_layerwise_test
}  // namespace tessera::testing
