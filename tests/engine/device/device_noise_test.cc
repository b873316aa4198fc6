// Tests "noise_scale" on an emulated GPU. The GPU squares a rank's own gradients and computes the noise scale itself.
// Its results have the same bits as those of the CPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/config/strategy_names.h"
#include "tests/support/pairwise.h"
#include "tests/support/stderr_of.h"

namespace tessera::testing {
namespace device_noise_test {

using ::testing::HasSubstr;

/// The way in which a step's microbatches are summed.
struct How {
  std::int64_t accumulation = 1;
  GradientSync sync = GradientSync::kEachMicrobatch;
  bool in_backward = false;
};
constexpr How kHows[] = {{1}, {2}, {3, GradientSync::kLastMicrobatch}, {1, {}, /*in_backward=*/true}};

Strategy measuring(const Placed& placed, DType dtype, const How& how) {
  Strategy strategy = strategy_of(placed, dtype, how.accumulation);
  strategy.gradient_sync = how.sync;
  if (how.in_backward) update_in_backward(strategy);
  strategy.noise_scale.every = 2;
  strategy.noise_scale.smoothing = 0.5;
  return strategy;
}

/// Checks that `body` returns the same on GPUs as on the CPU.
Told expect_as_on_the_cpu(int ranks, const std::function<Told(const Mesh&)>& body, const std::string& what) {
  const Told wanted = told_on({.ranks = ranks}, body);
  on_gpus(ranks, [&](const ThreadRanks& joined, const std::string& how) {
    expect_same(told_on(joined, body), wanted, what + how);
  });
  return wanted;
}

TEST(DeviceNoise, ResultsAreTheCpusUnderEveryStrategy) {
  constexpr int kRanks[] = {1, 2, 3};
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
  const auto exists = [](const Placed&, int ranks, const How& how, DType) { return ranks * how.accumulation > 1; };
  for (const auto& [placed, ranks, how, dtype] : pairwise_where(exists, kStrategies, kRanks, kHows, kDTypes)) {
    const Strategy strategy = measuring(placed, dtype, how);
    const std::string what = name_of(placed) + ", ranks " + std::to_string(ranks) + ", microbatches " +
                             std::to_string(how.accumulation) + (how.in_backward ? ", in backward" : "") + ", ";
    const Told told = expect_as_on_the_cpu(
        ranks,
        [&](const Mesh& mesh) {
          Session session(mesh, strategy, kTwoBlocks);
          return told_by(session, train(session, 0, 5));
        },
        what);
    EXPECT_EQ(told.steps[0].noise_batch, 0) << what;
    EXPECT_GT(told.steps[1].noise_batch, 0) << what;
    EXPECT_NE(told.steps[3].noise_variance, told.steps[1].noise_variance) << what;
  }
}

/// Tests steps that overflow, microbatches that are dropped, and a microbatch with weight 0.
TEST(DeviceNoise, SkippedDroppedAndWeightlessMicrobatchesCountAsOnTheCpu) {
  for (const auto& [kind, dtype, sync] :
       pairwise_of(kThree, std::array{DType::kF16, DType::kF32},
                   std::array{GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch})) {
    Strategy strategy = scheduled(kind, dtype);
    strategy.gradient_accumulation = 2;
    strategy.gradient_sync = sync;
    strategy.noise_scale.every = 1;
    expect_as_on_the_cpu(
        2,
        [&](const Mesh& mesh) {
          Session session(mesh, strategy, kTwoBlocks);
          std::vector<StepResult> steps = train(session, 0, 2);
          session.engine.backward(session.loss(5) * 3);
          session.engine.zero_grad();
          session.engine.backward(session.loss(2) * std::numeric_limits<float>::infinity());
          session.engine.backward(session.loss(3));
          steps.push_back(session.engine.step());
          session.engine.backward(session.loss(4));
          if (mesh.rank() == 0)
            session.engine.backward(session.loss(5), {.weight = 2});
          else
            session.engine.backward(session.loss(5) * std::numeric_limits<float>::quiet_NaN(), {.weight = 0});
          steps.push_back(session.engine.step());
          return told_by(session, std::move(steps));
        },
        c10::str("kind ", name_of(kind), ", type ", name_of(dtype), ", "));
  }
}

TEST(DeviceNoise, UnitThatIsReducedTwiceIsNotMeasuredAndSaidSo) {
  const std::string log = stderr_of([] {
    const EmulatedGpus gpus;
    run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
      Strategy strategy = measuring(ShardingStrategy::kFullShard, DType::kF32, {});
      strategy.noise_scale.every = 1;
      Session session(mesh, strategy, kTwoBlocks);
      session.engine.backward(session.loss(0), {.retain_graph = true});
      session.engine.backward(session.loss(1));
      StepResult step = session.engine.step();
      EXPECT_TRUE(std::isnan(step.noise_scale)) << "the device has to tell it";
      step.wait();
      EXPECT_EQ(step.noise_batch, 0);
      StepResult next = session.train(2);
      next.wait();
      EXPECT_GT(next.noise_batch, 0);
    });
  });
  EXPECT_THAT(log, HasSubstr("\"noise_scale\" cannot measure this step"));
}

TEST(DeviceNoise, CheckpointsGoOnAsOnTheCpuAndThere) {
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard})
    expect_checkpoints_as_on_the_cpu(2, measuring(kind, DType::kBF16, {}), name_of(kind) + ", ");
}

}  // namespace device_noise_test
}  // namespace tessera::testing
