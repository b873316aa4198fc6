// Tests "broadcast_buffers": "microbatch_order": the running statistics of batch norms have the bits of one rank that
// computes all microbatches of a step, whichever ranks compute them.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/detailed_plan.h"
#include "tessera/sync_batch_norm.h"
#include "tests/engine/files/normed_runs.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/stand_ins/wrapped_groups.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace reproducible_test {
namespace {

std::string of_one_rank() {
  NormedResult alone;
  run_ranks({}, [&](const Mesh& mesh) {
    alone = train_normed(mesh, in_order(ShardingStrategy::kFullShard, GradientSync::kEachMicrobatch, 1));
  });
  return alone.bytes;
}

/// Trains on ranks that are threads, and expects that each rank has the bytes `wanted`. Returns rank 0's result.
NormedResult expect_bytes(const std::string& wanted, int ranks, const Strategy& strategy, const NormedRun& run = {}) {
  std::vector<NormedResult> each(static_cast<std::size_t>(ranks));
  run_ranks({.ranks = ranks},
            [&](const Mesh& mesh) { each[static_cast<std::size_t>(mesh.rank())] = train_normed(mesh, strategy, run); });
  for (const NormedResult& result : each) EXPECT_TRUE(result.bytes == wanted) << ranks << " ranks";
  return each[0];
}

TEST(RunningStatistics, AnyNumberOfRanksGivesTheBitsOfOne) {
  const std::string wanted = of_one_rank();
  const Placed placements[] = {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard,
                               Placed(ShardingStrategy::kFullShard, /*shared=*/true)};
  for (const Placed& placed : placements) {
    for (const GradientSync sync : kBothSyncs) {
      for (const int ranks : {1, 2, 4}) {
        SCOPED_TRACE(name_of(placed) + (sync == GradientSync::kLastMicrobatch ? ", last" : ", each"));
        expect_bytes(wanted, ranks, in_order(placed, sync, ranks));
      }
    }
  }
  const Strategy of_three = in_order(ShardingStrategy::kShardGradients, GradientSync::kLastMicrobatch, 3);
  expect_bytes(wanted, 3, of_three, {.slow_rank = 1});
}

TEST(RunningStatistics, ProcessesThatGlooJoinsGiveTheBitsOfOneRank) {
  at::set_num_threads(1);
  const std::string wanted = of_one_rank();
  for (const auto& [ranks, hosts] : {std::pair(2, 2), {4, 1}}) {
    Strategy strategy = in_order(ShardingStrategy::kFullShard, GradientSync::kLastMicrobatch, ranks);
    if (hosts == 1) strategy.comm.transport = TransportChoice::kGloo;
    on_hosts(
        ranks, hosts,
        [&, &ranks = ranks](const Mesh& mesh) {
          require(train_normed(mesh, strategy).bytes == wanted, std::to_string(ranks) + " processes have other bits");
        },
        strategy.comm);
  }
}

// If "microbatch_order" is not set, a rank's statistics contain only its own microbatches. This test shows that the
// tests above can fail.
TEST(RunningStatistics, RanksDifferWithoutTheOrder) {
  std::vector<std::string> each(2);
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Strategy strategy = in_order(ShardingStrategy::kFullShard, GradientSync::kEachMicrobatch, 2);
    strategy.reproducible = false;
    strategy.broadcast_buffers = BufferBroadcast::kNone;
    each[static_cast<std::size_t>(mesh.rank())] = train_normed(mesh, strategy).bytes;
  });
  EXPECT_TRUE(each[0] != each[1]);
}

TEST(RunningStatistics, MicrobatchesMadeAgainCountOnce) {
  Strategy strategy = in_order(ShardingStrategy::kShardGradients, GradientSync::kLastMicrobatch, 2);
  strategy.deal = {.by = DealBy::kSpeed, .window = 1000, .backups = 2};
  EXPECT_GT(expect_bytes(of_one_rank(), 2, strategy, {.slow_rank = 1}).made_again, 0);
}

TEST(RunningStatistics, ACheckpointGoesOnWithOtherRanksToTheSameBits) {
  const std::string wanted = of_one_rank();
  const TestFolder folder;
  const GradientSync each = GradientSync::kEachMicrobatch;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    train_normed(mesh, in_order(ShardingStrategy::kFullShard, each, 2), {.end = 1, .to = folder.path()});
  });
  for (const int ranks : {1, 4})
    expect_bytes(wanted, ranks, in_order(ShardingStrategy::kFullShard, each, ranks),
                 {.begin = 1, .from = folder.path()});
}

// One step of the Engine changes the statistics as eight forwards of plain LibTorch with the same parameters do.
// Forwards that are computed again for backward do not count.
TEST(RunningStatistics, OneStepCountsAsPlainForwardsDo) {
  at::set_num_threads(1);
  Normed plain;
  for (std::int64_t microbatch = 0; microbatch < kAll; ++microbatch)
    plain->forward(rows_of(0, microbatch), microbatch % 3 == 1);
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Normed model;
    Engine engine(model, in_order(ShardingStrategy::kShardGradients, GradientSync::kLastMicrobatch, 2), mesh);
    while (!engine.step_is_due()) {
      const std::int64_t microbatch = engine.microbatch();
      engine.backward(model->forward(rows_of(0, microbatch), microbatch % 3 == 1).square().mean());
    }
    engine.step();
    const auto wanted = plain->named_buffers(), got = model->named_buffers();
    ASSERT_EQ(got.size(), static_cast<std::size_t>(3 * kNorms));
    for (const auto& item : wanted) {
      const at::Tensor difference = (got[item.key()] - item.value()).abs().max();
      EXPECT_LE(difference.item<double>(), item.value().is_floating_point() ? 1e-5 : 0.0) << item.key();
    }
  });
}

TEST(RunningStatistics, DroppedMicrobatchesDoNotCount) {
  run_ranks({}, [&](const Mesh& mesh) {
    Normed model;
    Engine engine(model, in_order(ShardingStrategy::kFullShard, GradientSync::kEachMicrobatch, 1), mesh);
    engine.backward(model->forward(rows_of(0, 0), true).square().mean());
    engine.zero_grad();
    for (const at::Tensor& buffer : {model->moving->running_mean, model->rare->num_batches_tracked})
      EXPECT_EQ(buffer.abs().max().item<double>(), 0.0);
    for (std::int64_t microbatch = 0; microbatch < kAll; ++microbatch) {
      const at::Tensor loss = model->forward(rows_of(0, microbatch), true).square().mean();
      if (microbatch == 0) engine.zero_grad();  // as many loops do: this forward counts
      engine.backward(loss);
    }
    engine.step();
    EXPECT_EQ(model->twice->num_batches_tracked.item<std::int64_t>(), 2 * kAll);
  });
}

/// The all-gathers of running statistics that a rank made.
struct Gathers {
  std::int64_t calls = 0;
  std::size_t bytes = 0;
};

/// Passes all calls on, and counts the all-gathers of running statistics.
class StatisticsCounter final : public ForwardingCollectives {
 public:
  StatisticsCounter(std::shared_ptr<Collectives> inner, Gathers& gathers)
      : ForwardingCollectives(std::move(inner)), gathers_(gathers) {}

 protected:
  Work do_all_gather(const GatherCall& call) override {
    if (call.label == "running statistics") ++gathers_.calls, gathers_.bytes += call.bytes_per_rank;
    return ForwardingCollectives::do_all_gather(call);
  }

 private:
  Gathers& gathers_;
};

TEST(RunningStatistics, AStepSendsThemInOneGatherOfThePlannedBytes) {
  const Strategy strategy = in_order(ShardingStrategy::kFullShard, GradientSync::kLastMicrobatch, 2);
  Normed model;
  Topology topology;
  topology.world_size = topology.local_world_size = 2;
  topology.launcher = "thread";
  const std::int64_t planned = plan_in_detail(*model, strategy, topology).statistics_message_bytes();
  EXPECT_EQ(planned, kAll / 2 * kNorms * (2 + 2 * kWidth) * 8);
  std::mutex mutex;
  std::vector<std::unique_ptr<Gathers>> counts;
  ThreadRanks ranks{.ranks = 2};
  ranks.wrap_groups = [&](std::shared_ptr<GroupFactory> factory) -> std::shared_ptr<GroupFactory> {
    const std::lock_guard lock(mutex);
    Gathers* const own = counts.emplace_back(std::make_unique<Gathers>()).get();
    return wrapped_groups(std::move(factory), [own](const std::string&, auto group) {
      return std::make_shared<StatisticsCounter>(std::move(group), *own);
    });
  };
  run_ranks(ranks, [&](const Mesh& mesh) { train_normed(mesh, strategy); });
  for (const auto& gathers : counts) {
    EXPECT_EQ(gathers->calls, kStepsOfRun);
    EXPECT_EQ(static_cast<std::int64_t>(gathers->bytes), kStepsOfRun * planned);
  }
}

/// Returns the error of an Engine over a module that has `Norm` as its child "norm".
template <class Norm>
std::string refusal_of(const Norm& norm, const Strategy& strategy) {
  std::string text;
  run_ranks({}, [&](const Mesh& mesh) {
    auto model = std::make_shared<torch::nn::Module>();
    model->register_module("norm", norm(mesh));
    model->register_module("linear", torch::nn::Linear(4, 4));
    text = error_of([&] { const Engine engine(model, strategy, mesh); });
  });
  return text;
}

TEST(RunningStatistics, WhatCannotBeKeptIsRefusedByName) {
  const Strategy strategy = in_order(ShardingStrategy::kFullShard, GradientSync::kEachMicrobatch, 1);
  const auto instance = [](const Mesh&) {
    return torch::nn::InstanceNorm1d(torch::nn::InstanceNormOptions(4).track_running_stats(true));
  };
  const auto over_ranks = [](const Mesh& mesh) {
    return SyncBatchNorm(torch::nn::BatchNormOptions(4).track_running_stats(false), mesh);
  };
  const auto plain = [](const Mesh&) { return torch::nn::BatchNorm1d(4); };
  const std::string of_instance = refusal_of(instance, strategy), of_sync = refusal_of(over_ranks, strategy);
  EXPECT_NE(of_instance.find("microbatch_order knows those of a BatchNorm alone"), std::string::npos) << of_instance;
  EXPECT_NE(of_sync.find("module norm is a SyncBatchNorm, which normalises over"), std::string::npos) << of_sync;
  EXPECT_EQ(refusal_of(plain, strategy), "");
  Strategy not_reproducible = strategy;
  not_reproducible.reproducible = false;
  const std::string alone = refusal_of(plain, not_reproducible);
  EXPECT_NE(alone.find("microbatch_order needs reproducible"), std::string::npos) << alone;
}

// Code that hides its operators writes the statistics itself. A single such write is accepted, since a program may have
// loaded the statistics.
TEST(RunningStatistics, WritesThatNoForwardExplainsAreRefused) {
  run_ranks({}, [&](const Mesh& mesh) {
    Normed model;
    Engine engine(model, in_order(ShardingStrategy::kFullShard, GradientSync::kEachMicrobatch, 1), mesh);
    const auto write = [&](std::int64_t microbatch) {
      model->rare->running_mean.add_(1);
      engine.backward(model->forward(rows_of(0, microbatch), false).square().mean());
    };
    write(0);
    const std::string text = error_of(ExitCode::kUsage, [&] { write(1); });
    EXPECT_NE(text.find("writes the running statistics of module rare"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace reproducible_test
}  // namespace tessera::testing
