// Tests a program's own rule for elements on an emulated GPU. Training gives the same bits as on the CPU, however late
// the device is, because LibTorch runs the rule's operators on the CPU in both cases.

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
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/own_adamw.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_own_test {

using ::testing::HasSubstr;
using Elements = ElementwiseOptimizer::Elements;

/// A rule without states. It returns a part of a larger tensor, so kernels get an odd address.
struct SignDescent final : ElementwiseOptimizer {
  std::vector<std::string> states() const override { return {}; }
  void update(Elements& e) const override {
    const at::Tensor more = at::zeros({e.parameters.numel() + 1}, e.parameters.options());
    e.parameters = more.narrow(0, 1, e.parameters.numel()).copy_(e.parameters - e.lr * e.gradient.sign());
  }
};

/// Gives the strategy the rule, and groups with their own rates and decay.
Strategy with_own(Strategy strategy) {
  strategy.optimizer = {.type = OptimizerType::kOwn, .lr = 1e-2, .weight_decay = 0.1};
  strategy.optimizer.groups = {{.name = "vectors", .max_dim = 1, .lr_ratio = 2, .weight_decay = 0.0},
                               {.name = "downs", .match = {"blocks.*.down.weight"}, .weight_decay = 0.3}};
  return strategy;
}

struct Case {
  DType dtype;
  int ranks;
  std::int64_t accumulation;
};
constexpr Case kCases[] = {
    {DType::kF32, 1, 1}, {DType::kBF16, 1, 3}, {DType::kF16, 2, 1}, {DType::kBF16, 3, 1}, {DType::kF32, 4, 1}};

TEST(DeviceOwn, GivesTheCpusBitsUnderEveryStrategy) {
  std::vector<std::pair<Placed, bool>> all = {{ShardingStrategy::kHybridShard, false},
                                              {ShardingStrategy::kHybridShard, true}};  // true: cut over the world
  for (const Placed& placed : kStrategies) all.emplace_back(placed, false);
  const auto is_hybrid = [](const std::pair<Placed, bool>& where) {
    return where.first.kind == ShardingStrategy::kHybridShard;
  };
  const auto exists = [&](const Case& on, bool, const std::pair<Placed, bool>& where, bool is_awkward) {
    return !is_hybrid(where) || (on.ranks == 4 && !is_awkward);
  };
  constexpr std::array kBoth{false, true};
  for (const auto& [on, averages, where, is_awkward] : pairwise_where(exists, kCases, kBoth, all, kBoth)) {
    TrainOptions options = short_run();
    if (is_awkward) options.model = kOfEveryKind;
    Strategy strategy = with_own(strategy_of(where.first, on.dtype, on.accumulation));
    strategy.optimizer.shard_over_world = where.second;
    if (averages) {
      options.own_rules = OwnRules::of(std::make_shared<OwnAdamW>());
      strategy.ema.decay = 0.75;
    } else {
      options.own_rules = OwnRules::of(std::make_shared<SignDescent>());
    }
    expect_same_on_gpus({.ranks = on.ranks, .hosts = is_hybrid(where) ? 2 : 1}, strategy, options,
                        std::string(averages ? "AdamW with averages, " : "without states, ") + name_of(where.first) +
                            (where.second ? " over the world" : "") + ", " + std::string(name_of(on.dtype)) + " on " +
                            std::to_string(on.ranks) + " ranks" + (is_awkward ? ", awkward" : ""));
  }
}

/// The rule is called for the parts of a large parameter, one after the other.
TEST(DeviceOwn, LargeParameterIsUpdatedInPortions) {
  TrainOptions options = short_run();
  options.steps = 2;
  options.model = {.vocab = ElementwiseOptimizer::kMostElementsOnGpu / 16 + 100, .width = 16, .blocks = 1};
  options.model.tied_head = true;
  options.own_rules = OwnRules::of(std::make_shared<OwnAdamW>());
  const Strategy strategy = with_own(strategy_of(ShardingStrategy::kNoShard, DType::kBF16, 1));
  expect_same_on_gpus({.ranks = 1}, strategy, options, "two portions");
}

TEST(DeviceOwn, ParametersUnusedInSomeStepsGiveTheCpusBits) {
  expect_left_out_as_on_the_cpu(with_own, "own", OwnRules::of(std::make_shared<OwnAdamW>()));
}

TEST(DeviceOwn, CallsAroundStepsGiveTheCpusBits) {
  expect_led_as_on_the_cpu(with_own, "own", OwnRules::of(std::make_shared<OwnAdamW>()));
}

/// Returns the error that an Engine with `rule` throws on a GPU, either when it is made or in a step.
std::string error_with(std::shared_ptr<const ElementwiseOptimizer> rule) {
  const EmulatedGpus gpus;
  return error_of([&] {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = with_own(strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1));
      Session session(mesh, strategy, kTwoBlocks, OwnRules::of(rule));
      session.train(0).wait();
    });
  });
}

TEST(DeviceOwn, RuleThatThrowsOrMovesATensorIsNamed) {
  struct Throws final : ElementwiseOptimizer {
    std::vector<std::string> states() const override { return {}; }
    void update(Elements&) const override { throw std::runtime_error("a rule with a toothache"); }
  };
  EXPECT_THAT(error_with(std::make_shared<Throws>()), HasSubstr("a rule with a toothache"));
  struct Elsewhere final : ElementwiseOptimizer {
    std::vector<std::string> states() const override { return {}; }
    void update(Elements& e) const override { e.parameters = e.parameters.to(at::kMeta); }
  };
  EXPECT_THAT(error_with(std::make_shared<Elsewhere>()), HasSubstr("on meta"));
}

}  // namespace device_own_test
}  // namespace tessera::testing
