// Tests Muon on an emulated GPU: it has the CPU's bits, however late the device is. LibTorch computes the matrix
// products on the CPU in both cases.

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <utility>

#include "checkpoint/manifest.h"
#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_muon_test {

/// Gives the strategy Muon, with clipping.
Strategy with_muon(Strategy strategy) {
  OptimizerConfig& optimizer = strategy.optimizer;
  const auto groups = std::move(optimizer.groups);
  const StateDType states = optimizer.state_dtype;
  optimizer = {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1};
  optimizer.groups = groups;
  optimizer.state_dtype = states;
  return strategy;
}

class DeviceMuon : public ::testing::TestWithParam<RuleCase> {};

TEST_P(DeviceMuon, GivesTheCpusBitsUnderEveryStrategy) {
  const auto [dtype, ranks, accumulation, states] = GetParam();
  const auto of = [&, dtype = dtype, accumulation = accumulation, states = states](const Placed& placed) {
    Strategy strategy = strategy_of(placed, dtype, accumulation);
    strategy.optimizer.state_dtype = states;
    return with_muon(strategy);
  };
  TrainOptions awkward = short_run();
  awkward.model = kOfEveryKind;
  // The two models alternate from strategy to strategy and from case to case. Long tests train both in each case.
  std::int64_t turn = ranks + accumulation;
  for (const Placed& placed : kStrategies) {
    const bool is_awkwards_turn = turn++ % 2 == 1;
    if (!is_awkwards_turn || tests_are_long())
      expect_same_on_gpus({.ranks = ranks}, of(placed), short_run(), name_of(placed));
    if (is_awkwards_turn || tests_are_long())
      expect_same_on_gpus({.ranks = ranks}, of(placed), awkward, name_of(placed) + ", awkward");
  }
  if (ranks < 4) return;
  for (const bool world : {false, true}) {
    Strategy hybrid = of(ShardingStrategy::kHybridShard);
    hybrid.optimizer.shard_over_world = world;
    expect_same_on_gpus({.ranks = 4, .hosts = 2}, hybrid, short_run(), world ? "hybrid over the world" : "hybrid");
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceMuon, kRuleCases, [](const auto& info) { return name_of(info.param); });

TEST(DeviceMuon, GroupsOfEveryKindGiveTheCpusBits) {
  Strategy strategy = with_muon(strategy_of(ShardingStrategy::kShardGradients, DType::kBF16, 1));
  strategy.optimizer.groups = {{.name = "head", .match = {"head*"}, .type = OptimizerType::kAdamW},
                               {.name = "vectors", .max_dim = 1, .weight_decay = 0.0}};
  strategy.gradient_clipping = 0;
  strategy.gradient_clip_value = 1e-3;
  expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "a head for AdamW");
  strategy.optimizer.muon.nesterov = false;
  strategy.optimizer.muon.adjust_lr = MuonLrAdjustment::kMatchRmsAdamW;
  expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "without Nesterov's momentum");
  strategy.optimizer.muon.ns_dtype = DType::kBF16;
  expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "in bf16");
  strategy.optimizer.muon.momentum = 0;
  expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "without momentum");
}

/// Two batches of matrices are sent to other ranks, and sent back.
TEST(DeviceMuon, ExchangesOfMatricesCountAsExposed) {
  const EmulatedGpus gpus;
  double seconds[2] = {};
  for (const bool muon : {false, true}) {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1);
      Session session(mesh, muon ? with_muon(strategy) : strategy);
      StepResult result = session.train(0);
      result.wait();
      // the emulated clock counts one second for each wait
      if (mesh.rank() == 0) seconds[muon] = result.communication_seconds;
    });
  }
  EXPECT_GE(seconds[1], seconds[0] + 2);
}

TEST(DeviceMuon, CallsAroundStepsGiveTheCpusBits) {
  const auto with_groups = [](Strategy strategy) {
    strategy = with_muon(std::move(strategy));
    strategy.optimizer.groups = {
        {.name = "vectors", .max_dim = 1, .weight_decay = 0.0},
        {.name = "downs", .match = {"blocks.*.down.weight"}, .lr_ratio = 0.3, .weight_decay = 0.3}};
    return strategy;
  };
  expect_led_as_on_the_cpu(with_groups, "muon");
}

TEST(DeviceMuon, OptionsOfTheFirstRunAreKeptAfterALoad) {
  const TestFolder folder;
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1);
  strategy.optimizer = {.type = OptimizerType::kMuon};
  strategy.optimizer.groups = {{.name = "vectors", .max_dim = 1, .lr_ratio = 2}};
  std::string saved;
  told_on({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, kTwoBlocks);
    std::vector<StepResult> steps = train(session, 0, 2);
    const std::string path = save_checkpoint(session.engine, folder.path());
    if (mesh.rank() == 0) saved = path;
    return told_by(session, std::move(steps));
  });
  const std::string file = saved + "/manifest.json";
  auto manifest = read_manifest(file, TestFolder::content_of(file));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  manifest->defaults_version = 1;
  std::ofstream(file, std::ios::trunc) << write_manifest(*manifest);
  const auto body = [&](const Mesh& mesh) {
    Session session(mesh, strategy, kTwoBlocks);
    train(session, 0, 1);  // this step uses this version's defaults
    load_checkpoint(session.engine, saved);
    EXPECT_EQ(session.engine.strategy().optimizer.muon.adjust_lr, MuonLrAdjustment::kMatchRmsAdamW);
    return told_by(session, train(session, 2, 6));
  };
  const Told wanted = told_on({.ranks = 2}, body);
  on_gpus(2,
          [&](const ThreadRanks& joined, const std::string& how) { expect_same(told_on(joined, body), wanted, how); });
}

}  // namespace device_muon_test
}  // namespace tessera::testing
