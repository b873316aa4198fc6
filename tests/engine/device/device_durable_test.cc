// Tests "durable" on an emulated GPU. A run that ended continues from its last commit with the bits of a run that was
// not disturbed, on whichever tiers its state lies. Training continues while a commit is written.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "tessera/durable.h"
#include "tessera/error.h"
#include "tests/support/durable_runs.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace device_durable_test {

using ::testing::HasSubstr;

/// The tiers of parameters and of states, each with the share that lies on it, and the device that makes steps.
struct Lying {
  const char* name;
  OffloadedState parameters, states;
  OffloadedStep step = OffloadedStep::kGpu;
};
constexpr Lying kLying[] = {{"in memory", {}, {}},
                            {"states on the host", {}, {Tier::kHost, 0.5}},
                            {"by the CPU", {}, {Tier::kHost, 1}, OffloadedStep::kCpu},
                            {"states in files", {}, {Tier::kNvme, 0.6}},
                            {"parameters on the host", {Tier::kHost, 0.6}, {}},
                            {"all by the CPU", {Tier::kHost, 1}, {Tier::kHost, 1}, OffloadedStep::kCpu},
                            {"all in files", {Tier::kNvme, 1}, {Tier::kNvme, 1}}};

Strategy below(Strategy strategy, const Lying& lying) {
  OffloadConfig& offload = strategy.offload;
  const bool releases = strategy.strategy == ShardingStrategy::kFullShard;
  if (releases) offload.parameters = lying.parameters;
  offload.moments = lying.states;
  if (strategy.mixed_precision.param != DType::kF32) offload.masters = lying.states;
  if (lying.states.tier == Tier::kHost) offload.step = lying.step;
  if (offload.is_used()) offload.record_bytes = 4096;
  if (offload.uses_files()) {
    offload.paths = {std::filesystem::temp_directory_path().string()};
    offload.cache_bytes = 10000;
  }
  return strategy;
}

TEST(DeviceDurable, RunResumesFromItsLastCommitWithTheSameBits) {
  const EmulatedGpus gpus;
  const std::pair<TinyOptions, int> kRuns[] = {{kWide, 1}, {kAwkward, 2}};
  const auto exists = [](const Kept&, ShardingStrategy kind, const Lying& lying, const auto&) {
    return lying.parameters.tier == Tier::kMemory || kind == ShardingStrategy::kFullShard;
  };
  for (const auto& [kept, kind, lying, run] : pairwise_where(exists, sampled_kept(), kThree, kLying, kRuns)) {
    const TestFolder folder;
    const Strategy strategy = below(strategy_of(kept, kind), lying);
    const TinyOptions& options = run.first;
    const std::string what = tessera::testing::name_of(kept) + ", " + tessera::name_of(kind) + ", " + lying.name +
                             " on " + std::to_string(run.second) + " ranks";
    run_ranks(late({.ranks = run.second}),
              [&](const Mesh& mesh) { expect_goes_on(mesh, strategy, options, folder.path(), what); });
  }
}

/// Adafactor's states have their own shapes.
TEST(DeviceDurable, AdafactorRunResumesWithTheSameBits) {
  const EmulatedGpus gpus;
  for (const ShardingStrategy kind : kThree) {
    Strategy strategy = strategy_of(kKept[2], kind);
    strategy.optimizer = {.type = OptimizerType::kAdafactor, .lr = 1e-1, .weight_decay = 0.1};
    const TestFolder folder;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      expect_goes_on(mesh, strategy, kWide, folder.path(), "adafactor, " + tessera::name_of(kind));
    });
  }
}

/// A commit reads the state as it is when the commit begins, while the next step is computed.
TEST(DeviceDurable, TrainingGoesOnBesideCommits) {
  const EmulatedGpus gpus;
  for (const Lying& lying : kLying) {
    const TestFolder folder;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy plain = below(strategy_of(kKept[2], ShardingStrategy::kFullShard), lying);
      const Strategy durable = made_durable(plain, folder.path());
      const Values wanted = trained(mesh, plain, 5, kWide);
      {
        Session session(mesh, durable, kWide);
        EXPECT_EQ(session.engine.plan().use, session.engine.allocated()) << lying.name;
        EXPECT_EQ(train_durably(session, 0, 5), 5);
        session.engine.backward(session.loss(5));
      }
      Session next(mesh, durable, kWide);
      ASSERT_TRUE(resume_durable(next.engine).has_value()) << lying.name;
      EXPECT_TRUE(all_same_bits(next.values(), wanted)) << lying.name;
    });
  }
}

/// Weights that were replaced by their averages must be back before the commit.
TEST(DeviceDurable, CommitRightAfterShowingAveragesHoldsTheWeights) {
  const EmulatedGpus gpus;
  for (const Lying& lying : kLying) {
    const TestFolder folder;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Strategy plain = below(strategy_of(kKept[2], ShardingStrategy::kFullShard), lying);
      plain.ema.decay = 0.5;
      const Strategy durable = made_durable(plain, folder.path());
      const auto averages_of = [](Session& session) {
        const Gathered averages(session.engine, Gathered::kEma);
        return values_of(*session.model);
      };
      Values wanted, wanted_averages;
      {
        Session session(mesh, durable, kWide);
        for (std::size_t i = 0; i < 4; ++i) {
          session.train(i);
          wanted_averages = averages_of(session);
          commit_durable(session.engine);
        }
        wanted = session.values();
      }
      Session next(mesh, durable, kWide);
      ASSERT_TRUE(resume_durable(next.engine).has_value()) << lying.name;
      EXPECT_TRUE(all_same_bits(next.values(), wanted)) << lying.name;
      EXPECT_TRUE(all_same_bits(averages_of(next), wanted_averages)) << lying.name;
    });
  }
}

TEST(DeviceDurable, CommitOfACpuRunIsRefused) {
  const TestFolder folder;
  const Strategy durable = made_durable(strategy_of(kKept[2], ShardingStrategy::kFullShard), folder.path());
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, durable, kWide);
    train_durably(session, 0, 2);
  });
  const EmulatedGpus gpus;
  EXPECT_THAT(error_of([&] {
                run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) { const Session session(mesh, durable, kWide); });
              }),
              HasSubstr("its model, strategy or number of ranks is another one"));
}

}  // namespace device_durable_test
}  // namespace tessera::testing
