// Tests outer steps ("sync") on an emulated GPU: replicas that train by themselves have the CPU's bits after each outer
// step.

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "tessera/checkpoint.h"
#include "tests/support/limits/patience.h"
#include "tests/support/pairwise.h"
#include "tests/support/stand_ins/late_backend.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace device_sync_test {

using ::testing::HasSubstr;

struct Shape {
  int replicas, shards;
  ShardingStrategy kind;
  int ranks() const { return replicas * shards; }
};
constexpr std::array kShapes = {
    Shape{2, 1, ShardingStrategy::kNoShard},        Shape{3, 1, ShardingStrategy::kNoShard},
    Shape{2, 2, ShardingStrategy::kNoShard},        Shape{2, 2, ShardingStrategy::kShardOptimizer},
    Shape{2, 2, ShardingStrategy::kShardGradients}, Shape{2, 2, ShardingStrategy::kShardGradOp},
    Shape{2, 2, ShardingStrategy::kHybridShard}};
constexpr std::array kTypes = {SyncType::kLocalSgd, SyncType::kPostLocalSgd, SyncType::kDiloco,
                               SyncType::kStreamingDiloco};

/// The dtype of parameters, and the kind of masters.
struct Masters {
  DType dtype;
  MasterKind kind = MasterKind::kSplitBF16;
};
constexpr std::array kMasters = {Masters{DType::kF32}, Masters{DType::kBF16}, Masters{DType::kBF16, MasterKind::kF32}};

Strategy with_sync(const Shape& shape, SyncType type, const Masters& masters = kMasters[0]) {
  Strategy strategy = strategy_of(shape.kind, masters.dtype, 1);
  strategy.mixed_precision.master = masters.kind;
  strategy.mesh = {shape.replicas, shape.shards};
  strategy.sync.type = type;
  strategy.sync.every = 3;
  if (type == SyncType::kStreamingDiloco) strategy.sync.fragments = 2;
  if (type == SyncType::kPostLocalSgd) strategy.sync.start_step = 2;
  return strategy;
}

std::string text_of(const Shape& shape, const Strategy& strategy) {
  return std::string(name_of(shape.kind)) + ", " + std::to_string(shape.replicas) + "x" + std::to_string(shape.shards) +
         ", type " + std::to_string(static_cast<int>(strategy.sync.type)) + ", " +
         std::string(name_of(strategy.mixed_precision.param)) + ", masters " +
         std::to_string(static_cast<int>(strategy.mixed_precision.master)) + ", ";
}

/// A rank's part of a run. All ranks of the run get the same `folder`, which no other run uses.
using Body = std::function<Told(const Mesh&, const std::string& folder)>;

/// Returns the result of `body` on each rank [rank].
std::vector<Told> told_by_all(const ThreadRanks& ranks, const Body& body) {
  const TestFolder folder;
  std::vector<Told> told(static_cast<std::size_t>(ranks.ranks));
  run_ranks(ranks, [&](const Mesh& mesh) {
    told[static_cast<std::size_t>(mesh.rank())] = body(mesh, folder.path().string());
  });
  return told;
}

/// Checks that `body` returns the same on every rank with a GPU as on the CPU. Returns the results of the CPU. The
/// replicas differ, so every rank is compared. Ranks are joined over a backend, and also in one of the ways of
/// on_gpus_in_turn.
std::vector<Told> expect_as_on_the_cpu(int ranks, const Body& body, const std::string& what) {
  const std::vector<Told> wanted = told_by_all({.ranks = ranks}, body);
  const auto expect = [&](const ThreadRanks& joined, const std::string& how) {
    const std::vector<Told> got = told_by_all(joined, body);
    for (std::size_t rank = 0; rank < wanted.size(); ++rank)
      expect_same(got[rank], wanted[rank], what + how + ", rank " + std::to_string(rank));
  };
  on_gpus_in_turn(ranks, expect);
  const EmulatedGpus gpus;
  expect(over_backend({.ranks = ranks}), "over a backend");
  return wanted;
}

/// Trains steps [begin, end). Checks that each step needs as much memory as its plan says.
std::vector<StepResult> train_as_planned(Session& session, std::size_t begin, std::size_t end) {
  std::vector<StepResult> steps = train(session, begin, end);
  for (const StepResult& step : steps) EXPECT_EQ(step.planned, step.allocated) << "step " << step.step;
  return steps;
}

TEST(DeviceSync, EveryTypeGivesTheCpusBitsUnderEveryStrategy) {
  for (const auto& [shape, type, masters] : pairwise_of(kShapes, kTypes, kMasters)) {
    const Strategy strategy = with_sync(shape, type, masters);
    const std::vector<Told> told = expect_as_on_the_cpu(
        shape.ranks(),
        [&](const Mesh& mesh, const std::string&) {
          Session session(mesh, strategy, kTwoBlocks);
          return told_by(session, train_as_planned(session, 0, 8));  // the replicas meet after 6 steps
        },
        text_of(shape, strategy));
    EXPECT_FALSE(all_same_bits(told.front().values, told.back().values)) << "replicas never trained apart";
  }
}

TEST(DeviceSync, RightAfterAnOuterStepReplicasAreAlikeThere) {
  for (const Shape& shape : kShapes) {
    for (const SyncType type : {SyncType::kLocalSgd, SyncType::kDiloco}) {
      const Strategy strategy = with_sync(shape, type, kMasters[1]);
      const EmulatedGpus gpus;
      const std::vector<Told> told =
          told_by_all(late({.ranks = shape.ranks()}), [&](const Mesh& mesh, const std::string&) {
            Session session(mesh, strategy, kTwoBlocks);
            return told_by(session, train(session, 0, 6));
          });
      for (const Told& each : told) EXPECT_TRUE(all_same_bits(each.values, told[0].values)) << text_of(shape, strategy);
    }
  }
}

TEST(DeviceSync, FragmentsThatAreLongUnderWayOrNotAtAllGiveTheCpusBits) {
  struct Case {
    std::int64_t every, fragments, delay;
    double mix;
  };
  const Shape shape{2, 2, ShardingStrategy::kHybridShard};
  for (const Case& each : {Case{6, 3, 2, 0.25}, Case{2, 2, 0, 0}, Case{3, 1, 2, 0.5}}) {
    Strategy strategy = with_sync(shape, SyncType::kStreamingDiloco, kMasters[1]);
    strategy.sync.every = each.every;
    strategy.sync.fragments = each.fragments;
    strategy.sync.delay = each.delay;
    strategy.sync.mix = each.mix;
    expect_as_on_the_cpu(
        shape.ranks(),
        [&](const Mesh& mesh, const std::string&) {
          Session session(mesh, strategy, kTwoBlocks);
          return told_by(session, train_as_planned(session, 0, 9));
        },
        "every " + std::to_string(each.every) + ", ");
  }
}

TEST(DeviceSync, RulesOfEveryKindGiveTheCpusBits) {
  const Shape shape{2, 2, ShardingStrategy::kShardOptimizer};
  for (const OptimizerType type : {OptimizerType::kSgd, OptimizerType::kLion, OptimizerType::kRmsprop,
                                   OptimizerType::kLamb, OptimizerType::kLars}) {
    Strategy strategy = with_sync(shape, SyncType::kDiloco, kMasters[1]);
    strategy.optimizer.type = type;
    strategy.optimizer.momentum = 0.9;
    strategy.ema.decay = 0.75;
    expect_as_on_the_cpu(
        shape.ranks(),
        [&](const Mesh& mesh, const std::string&) {
          Session session(mesh, strategy, kTwoBlocks);
          return told_by(session, train(session, 0, 5));
        },
        std::string(name_of(type)) + ", ");
  }
}

/// A save averages states over replicas. It is made between two outer steps, and with post_local_sgd also once before
/// local steps begin. The CPU continues from a checkpoint of a GPU, and a GPU from a checkpoint of the CPU.
TEST(DeviceSync, CheckpointsInTheMiddleGoOnAsOnTheCpuAndThere) {
  for (const SyncType type : kTypes) {
    for (const Shape& shape : {kShapes[3], kShapes[6]}) {
      Strategy strategy = with_sync(shape, type, kMasters[shape.kind == ShardingStrategy::kHybridShard ? 1 : 2]);
      strategy.sync.every = 4;  // the save is after step 6
      if (type == SyncType::kPostLocalSgd && shape.kind == ShardingStrategy::kHybridShard) strategy.sync.start_step = 7;
      strategy.ema.decay = 0.75;
      expect_checkpoints_as_on_the_cpu(shape.ranks(), strategy, text_of(shape, strategy));
    }
  }
}

/// Replica 1 skips its steps, so its counts and states are left out of the average.
TEST(DeviceSync, AReplicaThatMadeNoUpdatesSaysNothingOfStatesAsOnTheCpu) {
  for (const Shape& shape : {kShapes[0], kShapes[6]}) {
    Strategy strategy = with_sync(shape, SyncType::kLocalSgd);
    strategy.sync.every = 8;
    strategy.ema.decay = 0.75;
    const std::vector<Told> told = expect_as_on_the_cpu(
        shape.ranks(),
        [&](const Mesh& mesh, const std::string& folder) {
          Session session(mesh, strategy, kTwoBlocks);
          std::vector<StepResult> steps;
          for (std::size_t i = 0; i < 3; ++i) {
            const bool overflows = mesh.rank() >= shape.shards;
            session.engine.backward(session.loss(i) * (overflows ? std::numeric_limits<double>::infinity() : 1.0));
            steps.push_back(session.engine.step());
          }
          save_checkpoint(session.engine, folder);
          EXPECT_EQ(session.engine.steps_applied(), 3);
          return told_by(session, std::move(steps));
        },
        text_of(shape, strategy));
    EXPECT_TRUE(told.back().steps.back().overflow);
    EXPECT_TRUE(all_same_bits(told.back().averages, told.front().averages));
  }
}

TEST(DeviceSync, AWriteBetweenTwoReachesAllReplicasAsOnTheCpu) {
  for (const Shape& shape : {kShapes[2], kShapes[6]}) {
    const Strategy strategy = with_sync(shape, SyncType::kDiloco, kMasters[1]);
    const std::vector<Told> told = expect_as_on_the_cpu(
        shape.ranks(),
        [&](const Mesh& mesh, const std::string&) {
          Session session(mesh, strategy, kTwoBlocks);
          std::vector<StepResult> steps = train(session, 0, 2);
          {
            Gathered guard(session.engine, Gathered::kWrite);
            const at::NoGradGuard no_grad;
            session.model->head.fill_(0.25);
            guard.close();
          }
          for (StepResult& step : train(session, 2, 6)) steps.push_back(std::move(step));
          return told_by(session, std::move(steps));
        },
        text_of(shape, strategy));
    for (const Told& each : told) EXPECT_TRUE(all_same_bits(each.values, told[0].values));
  }
}

TEST(DeviceSync, AnOuterStepThatFailsOnTheDeviceEndsTheRun) {
  const EmulatedGpus gpus;
  using Fault = LateBackend::Fault;
  std::array<LateBackend*, 2> backends = {};
  const auto keep = [&](const std::string& group, LateBackend& backend) {
    if (group.ends_with("replicate")) backends[static_cast<std::size_t>(backend.getRank())] = &backend;
  };
  const std::string told = error_of([&] {
    run_ranks(over_backend({.ranks = 2}, keep), [&](const Mesh& mesh) {
      Session session(mesh, with_sync(kShapes[0], SyncType::kDiloco), kTwoBlocks);
      for (StepResult& step : train(session, 0, 2)) step.wait();
      LateBackend* const backend = backends[static_cast<std::size_t>(mesh.rank())];
      ASSERT_NE(backend, nullptr);
      backend->fault = mesh.rank() == 0 ? Fault::kFailsOnTheDevice : Fault::kStandsStill;
      Deadline limit(std::chrono::seconds(20));
      StepResult step = session.train(2);
      while (backend->aborts == 0 && !limit.passed()) std::this_thread::yield();
      step.wait();
    });
  });
  EXPECT_THAT(told, HasSubstr("late: "));
}

TEST(DeviceSync, StateBelowTheDevicesMemoryIsRefusedByName) {
  Strategy strategy = with_sync(kShapes[0], SyncType::kDiloco);
  strategy.offload.moments = {Tier::kHost, 1};
  const EmulatedGpus gpus;
  EXPECT_THAT(error_of([&] {
                run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) { Session(mesh, strategy, kTwoBlocks).train(0); });
              }),
              HasSubstr("cannot stand beside offload of training state: outer steps go through masters in memory"));
}

}  // namespace device_sync_test
}  // namespace tessera::testing
