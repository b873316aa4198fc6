// Tests loss spikes on an emulated GPU. The GPU decides about them by itself. It must skip the steps that the CPU
// skips, and have the CPU's bits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "tessera/checkpoint.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace device_spikes_test {

using ::testing::HasSubstr;

Strategy watching(ShardingStrategy kind, DType dtype, std::int64_t window) {
  Strategy strategy = scheduled(kind, dtype);
  strategy.ema.decay = 0.75;
  strategy.on_spike = {.action = SpikeAction::kSkip, .factor = 3, .window = window};
  return strategy;
}

/// Makes a step for each height. The loss on the last rank is multiplied by the height. `save_after`: the step after
/// which a checkpoint is saved; 0: none.
Told course(const Mesh& mesh, const Strategy& strategy, const std::vector<double>& heights, std::size_t save_after = 0,
            const std::string& folder = "") {
  Session session(mesh, strategy, kTwoBlocks);
  std::vector<StepResult> steps;
  for (std::size_t i = 0; i < heights.size(); ++i) {
    const bool is_last = mesh.rank() == mesh.world_size() - 1;
    session.engine.backward(session.loss(i) * (is_last ? heights[i] : 1.0));
    steps.push_back(session.engine.step());
    if (i + 1 == save_after) save_checkpoint(session.engine, folder);
  }
  return told_by(session, std::move(steps));
}

std::size_t spikes_in(const Told& told) {
  return static_cast<std::size_t>(std::ranges::count_if(told.steps, &StepResult::spike));
}

/// The losses have a single spike, and then so many spikes in a row that the higher loss counts as normal. After that,
/// there is one spike above the higher loss.
const std::vector<double> kHeights = {1, 1, 1, 1, 40, 1, 1, 90, 90, 90, 90, 90, 90, 2000, 90, 90};

TEST(DeviceSpikes, SkippedStepsAreTheCpus) {
  for (const auto& [kind, dtype, window] : {std::tuple(ShardingStrategy::kNoShard, DType::kF32, 1),
                                            std::tuple(ShardingStrategy::kFullShard, DType::kBF16, 3),
                                            std::tuple(ShardingStrategy::kShardGradients, DType::kF16, 4),
                                            std::tuple(ShardingStrategy::kFullShard, DType::kF32, 2)}) {
    const Strategy strategy = watching(kind, dtype, window);
    const auto body = [&](const Mesh& mesh) { return course(mesh, strategy, kHeights); };
    const Told wanted = told_on({.ranks = 2}, body);
    const std::string what = std::string(name_of(kind)) + ", window " + std::to_string(window) + ", ";
    EXPECT_GE(spikes_in(wanted), 2U) << what;
    const auto expect = [&](const ThreadRanks& joined, const std::string& how) {
      expect_same(told_on(joined, body), wanted, what + how);
    };
    on_gpus(2, expect);
    const EmulatedGpus gpus;
    expect(over_backend({.ranks = 2}), "over a backend");
  }
}

TEST(DeviceSpikes, RollbackGivesTheCpusBits) {
  Strategy strategy = watching(ShardingStrategy::kFullShard, DType::kF32, 3);
  strategy.on_spike.action = SpikeAction::kRollback;
  strategy.checkpoint.dir = "elsewhere";
  const auto body = [&](const TestFolder& folder) {
    return [&](const Mesh& mesh) {
      return course(mesh, strategy, {1, 1, 1, 1, 1, 1, 40, 1, 1, 1}, /*save_after=*/4, folder / "c");
    };
  };
  const TestFolder of_cpu;
  const Told wanted = told_on({.ranks = 2}, body(of_cpu));
  EXPECT_EQ(spikes_in(wanted), 1U);
  on_gpus(2, [&](const ThreadRanks& joined, const std::string& how) {
    const TestFolder own;
    expect_same(told_on(joined, body(own)), wanted, how);
  });
}

/// The factor is so small that steps of ordinary training are spikes.
TEST(DeviceSpikes, CheckpointsHoldTheLossWindow) {
  Strategy strategy = watching(ShardingStrategy::kFullShard, DType::kF32, 3);
  strategy.on_spike.factor = 1.0001;
  expect_checkpoints_as_on_the_cpu(2, strategy, "spikes");
}

TEST(DeviceSpikes, NegativeLossIsRefused) {
  const EmulatedGpus gpus;
  EXPECT_THAT(error_of([] {
                run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
                  Session session(mesh, watching(ShardingStrategy::kFullShard, DType::kF32, 3));
                  session.engine.backward(session.loss(0) - 100);
                  session.engine.step().wait();
                });
              }),
              HasSubstr("/on_spike/action: the loss is -"));
}

}  // namespace device_spikes_test
}  // namespace tessera::testing
