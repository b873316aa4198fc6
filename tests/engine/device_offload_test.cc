// A GPU's masters and optimizer states in its host's memory and on disk, on an emulated GPU: the bits of the CPU that has all in
// memory, however late copies come; memory and traffic are the plan's; and what is done around a step finds the state where it lies.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "offload/fault_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tests/support/long_tests.h"
#include "tests/support/offloaded.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

/// Where a GPU's state lies.
struct Tiered {
  Tier tier;
  double masters, moments;  ///< shares of each
  std::int64_t queue_depth;
  std::int64_t record_bytes = 4096;
  std::int64_t cache_bytes = 0;  ///< in files
};
constexpr Tiered kAllOnHost{Tier::kHost, 1, 1, 1}, kAllOnNvme{Tier::kNvme, 1, 1, 1},
    kSomeOnHost{Tier::kHost, 0.3, 0.6, 2}, kSomeOnNvme{Tier::kNvme, 0.6, 0.3, 2, 8192, 20000};
constexpr Tiered kTiered[] = {kAllOnHost, kSomeOnNvme, kSomeOnHost, kAllOnNvme};

std::string name_of(const Tiered& tiered) {
  return std::string(tiered.tier == Tier::kHost ? "host " : "nvme ") + std::to_string(tiered.masters) + " " +
         std::to_string(tiered.moments) + ", queue_depth " + std::to_string(tiered.queue_depth);
}

Strategy below(Strategy strategy, const Tiered& tiered) {
  const auto state = [&](double fraction) {
    return fraction > 0 ? OffloadedState{tiered.tier, fraction} : OffloadedState{};
  };
  strategy.offload.masters = state(tiered.masters);
  strategy.offload.moments = state(tiered.moments);
  strategy.offload.queue_depth = tiered.queue_depth;
  strategy.offload.record_bytes = tiered.record_bytes;
  if (tiered.tier != Tier::kNvme) return strategy;
  strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
  strategy.offload.cache_bytes = tiered.cache_bytes;
  return strategy;
}

/// Several records a group.
TrainOptions wide_run(const TinyOptions& model = kWide) {
  TrainOptions options = short_run();
  options.model = model;
  options.model.blocks = 2;
  options.steps = 6;
  return options;
}

void expect_the_cpus_bits(const ThreadRanks& ranks, const Strategy& strategy, std::span<const Tiered> all,
                          const TrainOptions& options, const std::string& what) {
  const Trained on_cpu = train_on_threads(ranks, strategy, options);
  const EmulatedGpus gpus;
  for (const Tiered& tiered : all) {
    const auto expect = [&](const ThreadRanks& joined, const std::string& how) {
      const std::string which = what + ", " + name_of(tiered) + how;
      const Trained trained = train_on_threads(joined, below(strategy, tiered), options);
      expect_same_bits(trained, on_cpu, which);
      EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << which;
      EXPECT_GT(trained.traffic.streamed_bytes, 0) << which;
      EXPECT_EQ(trained.traffic.disk_bytes_written > 0, tiered.tier == Tier::kNvme) << which;
    };
    expect(late(ranks), "");
    if (ranks.ranks > 1 && tests_are_long()) expect(on_one_gpu(ranks), " on one GPU");
  }
}

struct Case {
  Kept kept;
  int ranks;
  std::int64_t accumulation;
};

class DeviceOffload : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceOffload, GivesTheCpusBitsUnderEveryStrategy) {
  const auto [kept, ranks, accumulation] = GetParam();
  const auto adjusted = [&](const Placed& placed) {
    Strategy strategy = strategy_of(placed, kept.param, accumulation);
    strategy.mixed_precision.master = kept.master;
    strategy.optimizer.state_dtype = kept.state;
    if (kept.param != DType::kF16) return strategy;
    strategy.mixed_precision.loss_scale.initial = 16777216.0;  // the first steps are skipped
    strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
    return strategy;
  };
  for (const Placed& placed : kStrategies) {
    std::vector<Tiered> all;
    for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
      for (const double share : {0.3, 1.0}) {
        for (const std::int64_t depth : {1, 4}) all.push_back({tier, share, share, depth});
      }
    }
    expect_the_cpus_bits({.ranks = ranks}, adjusted(placed), all, wide_run(), name_of(placed));
  }
  if (ranks < 4) return;
  Strategy hybrid = adjusted(ShardingStrategy::kHybridShard);
  for (const bool world : {false, true}) {
    hybrid.optimizer.shard_over_world = world;
    expect_the_cpus_bits({.ranks = 4, .hosts = 2}, hybrid, kTiered, wide_run(), world ? "hybrid, world" : "hybrid");
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(name_of(c.kept.param)) + (c.kept.master == MasterKind::kF32 ? "_whole_" : "_") +
         tessera::name_of(c.kept.state) + "_ranks" + std::to_string(c.ranks) + "_accumulation" +
         std::to_string(c.accumulation);
}

INSTANTIATE_TEST_SUITE_P(All, DeviceOffload,
                         ::testing::Values(Case{{DType::kF32, MasterKind::kSplitBF16, StateDType::kF32}, 1, 1},
                                           Case{{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, 2, 3},
                                           Case{{DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16}, 3, 1},
                                           Case{{DType::kBF16, MasterKind::kF32, StateDType::k8Bit}, 2, 1},
                                           Case{{DType::kF16, MasterKind::kF32, StateDType::kF32}, 2, 1},
                                           Case{{DType::kF16, MasterKind::kF32, StateDType::k8Bit}, 1, 2},
                                           Case{{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, 4, 1}),
                         name_of_case);

TEST(DeviceOffload, OverflowsAreSkippedAndStateComesBackAsItWas) {
  Strategy strategy = scheduled(ShardingStrategy::kFullShard, DType::kF16);
  const TrainOptions options = wide_run();
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  EXPECT_TRUE(on_cpu.steps.front().overflow);
  EXPECT_FALSE(on_cpu.steps.back().overflow);
  expect_the_cpus_bits({.ranks = 2}, strategy, kTiered, options, "overflows");
}

/// Runs are cut inside records, and some parameters are never updated.
TEST(DeviceOffload, LeavesUnusedFrozenAndTiedParametersAsTheCpuDoes) {
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      expect_the_cpus_bits({.ranks = 2}, strategy_of(kind, dtype, 1), kTiered, wide_run(kAwkward),
                           tessera::name_of(kind));
    }
  }
}

TEST(DeviceOffload, StepsEveryRuleAsTheCpuDoes) {
  using enum OptimizerType;
  for (const OptimizerType type : {kSgd, kLion, kAdagrad, kRmsprop}) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
    strategy.optimizer.type = type;
    strategy.optimizer.momentum = 0.9;
    strategy.optimizer.centered = type == kRmsprop;
    expect_the_cpus_bits({.ranks = 2}, strategy, kTiered, wide_run(), tessera::name_of(type));
  }
}

/// They use the same queues.
TEST(DeviceOffload, GoesBesideActivationsInHostMemory) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 2);
  const TrainOptions options = wide_run();
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  const EmulatedGpus gpus;
  strategy.offload.activations = Tier::kHost;
  strategy.offload.activations_min_bytes = 1;
  for (const Tiered& tiered : kTiered) {
    expect_same_bits(train_on_threads(late({.ranks = 2}), below(strategy, tiered), options), on_cpu, name_of(tiered));
  }
}

/// In the device's memory, its slots and what stays there; in the host's, all records or those under way.
TEST(DeviceOffload, MemoryAndTrafficAreThePlans) {
  const EmulatedGpus gpus;
  for (const Kept& kept : kOneOfEachKind) {
    for (const Tiered& tiered : kTiered) {
      const std::string what = tessera::testing::name_of(kept) + ", " + name_of(tiered);
      run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
        Session session(mesh, below(strategy_of(kept, ShardingStrategy::kFullShard), tiered), kWide);
        const PlannedMemory plan = session.engine.plan();
        EXPECT_EQ(plan.use, session.engine.allocated()) << what;
        EXPECT_GT(plan.streamed_bytes, 0) << what;
        EXPECT_LT(plan.use.limited(), plan.use.total()) << what;
        if (tiered.tier == Tier::kHost) {
          EXPECT_EQ(plan.use[MemoryCategory::kHostRecords], plan.streamed_bytes) << what;
          EXPECT_EQ(plan.disk, DiskUse{}) << what;
          EXPECT_THAT(plan.table, HasSubstr("through the GPU: a step copies ")) << what;
        } else {
          expect_planned_disk_traffic(session, what);
        }
        if (tiered.masters == 1 && tiered.moments == 1) {
          EXPECT_EQ(plan.use[MemoryCategory::kMasters], 0) << what;
          EXPECT_EQ(plan.use[MemoryCategory::kOptimizer], 0) << what;
        }
        for (std::size_t i = 0; i < 3; ++i) {
          const std::int64_t before = session.engine.traffic().streamed_bytes;
          session.train(i);
          EXPECT_EQ(session.engine.traffic().streamed_bytes - before, plan.streamed_bytes) << what;
        }
        EXPECT_EQ(plan.use, session.engine.allocated()) << what;
      });
    }
  }
}

TEST(DeviceOffload, SaysHowFastRecordsGoThroughTheGpu) {
  const EmulatedGpus gpus;
  const std::string said = stderr_of([] {
    run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
      const Session session(mesh, below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1), kAllOnHost), kWide);
      EXPECT_EQ(session.engine.traffic().streamed_bytes, 0) << "what is measured is none of a step's";
    });
  });
  EXPECT_THAT(said,
              ContainsRegex("are streamed at [0-9.]+ .?i?B/s each way, measured now: a step takes [0-9.]+ s for "));
}

/// What lies in the host's memory does not count.
TEST(DeviceOffload, TheLimitIsOneOfTheDevicesMemory) {
  const EmulatedGpus gpus;
  const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
  const auto limited = [&](const Tiered& tiered, std::int64_t more) {
    return error_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Strategy strategy = below(strategy_of(kept, ShardingStrategy::kNoShard), tiered);
        std::int64_t needed = 0;
        {
          const Session session(mesh, strategy, kWide);
          needed = session.engine.plan().use.limited();
        }
        strategy.memory.limit_bytes = needed + more;
        const Session session(mesh, strategy, kWide);
      });
    });
  };
  for (const Tiered& tiered : kTiered) {
    EXPECT_EQ(limited(tiered, 0), "") << name_of(tiered);
    EXPECT_THAT(limited(tiered, -1), HasSubstr("/memory/limit")) << name_of(tiered);
  }
}

TEST(DeviceOffload, AveragesWeightsAsTheCpuDoes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const ShardingStrategy kind : kThree) {
      Strategy strategy = strategy_of(kind, dtype, 1);
      strategy.ema.decay = 0.75;
      const auto body = [&](const Strategy& own) {
        return [&](const Mesh& mesh) {
          Session session(mesh, own, kWide);
          std::vector<StepResult> steps = train(session, 0, 4);
          { const Gathered looks(session.engine, Gathered::kEma); }
          for (StepResult& step : train(session, 4, 7)) steps.push_back(step);
          return told_by(session, std::move(steps));
        };
      };
      const Told wanted = told_on({.ranks = 2}, body(strategy));
      const EmulatedGpus gpus;
      for (const Tiered& tiered : kTiered) {
        const Strategy own = below(strategy, tiered);
        expect_same(told_on(late({.ranks = 2}), body(own)), wanted, tessera::name_of(kind) + ", " + name_of(tiered));
      }
    }
  }
}

/// What programs do around steps: on the CPU with all in memory, and on GPUs with each tier.
void expect_values_as_on_the_cpu(const std::function<Values(const Mesh&, const Strategy&)>& body) {
  for (const Kept& kept : kOneOfEachKind) {
    for (const ShardingStrategy kind : kThree) {
      const Strategy strategy = strategy_of(kept, kind);
      const auto run = [&](const ThreadRanks& ranks, const Strategy& own) {
        return told_on(ranks, [&](const Mesh& mesh) { return Told{{}, body(mesh, own), {}}; });
      };
      const Told wanted = run({.ranks = 2}, strategy);
      const EmulatedGpus gpus;
      for (const Tiered& tiered : kTiered) {
        expect_same(run(late({.ranks = 2}), below(strategy, tiered)), wanted,
                    tessera::testing::name_of(kept) + ", " + tessera::name_of(kind) + ", " + name_of(tiered));
      }
    }
  }
}

TEST(DeviceOffload, WritesUnderGatheredReachTheRecords) { expect_values_as_on_the_cpu(&written_under_gathered); }

TEST(DeviceOffload, TheNextEngineTakesMastersFromTheRecords) { expect_values_as_on_the_cpu(&trained_by_two_engines); }

TEST(DeviceOffload, StatesAreCarriedWhenWhatTrainsChanges) {
  expect_values_as_on_the_cpu(&trained_with_weights_frozen_for_a_while);
}

TEST(DeviceOffload, ReplicasAreComparedWhereTheyLie) {
  expect_values_as_on_the_cpu([](const Mesh& mesh, const Strategy& given) {
    Strategy strategy = given;
    strategy.check.replica_hash_every = 1;
    return trained(mesh, strategy, 3, kWide);
  });
}

/// Saved there and loaded here, and the other way round.
TEST(DeviceOffload, CheckpointsGoBetweenTiersAndDevices) {
  std::vector<std::string> inexact;
  const auto save = [&](const Strategy& strategy, const TestFolder& folder) {
    return [&](const Mesh& mesh) { return saved_and_trained_on(mesh, strategy, folder.path().string()); };
  };
  const auto load = [&](const Strategy& strategy, const TestFolder& folder) {
    return [&](const Mesh& mesh) { return loaded_and_trained_on(mesh, strategy, folder.path().string(), inexact); };
  };
  for (const bool beside_training : {false, true}) {
    for (const Kept& kept : kOneOfEachKind) {
      Strategy strategy = scheduled(ShardingStrategy::kFullShard, kept.param);
      strategy.mixed_precision.master = kept.master;
      strategy.optimizer.state_dtype = kept.state;
      strategy.checkpoint.async = beside_training;
      const TestFolder of_cpu;
      const Told wanted = told_on({.ranks = 2}, save(strategy, of_cpu));
      for (const Tiered& tiered : kTiered) {
        const std::string what = tessera::testing::name_of(kept) + ", " + name_of(tiered);
        const Strategy own = below(strategy, tiered), other = below(strategy, kSomeOnHost);
        const TestFolder of_gpu;
        {
          const EmulatedGpus gpus;
          expect_same(told_on(late({.ranks = 2}), save(own, of_gpu)), wanted, what + ": saved");
          expect_same(told_on(late({.ranks = 2}), load(own, of_gpu)), wanted, what + ": loaded");
          EXPECT_TRUE(inexact.empty()) << what;
          expect_same(told_on(late({.ranks = 2}), load(other, of_gpu)), wanted, what + ": loaded on another tier");
          expect_same(told_on(late({.ranks = 2}), load(own, of_cpu)), wanted, what + ": loaded what the CPU saved");
        }
        expect_same(told_on({.ranks = 2}, load(strategy, of_gpu)), wanted, what + ": loaded by the CPU");
      }
    }
  }
}

TEST(DeviceOffload, ImportsSafetensorsAsTheCpuDoes) {
  const TestFolder folder;
  const std::string file = (folder / "exported").string();
  const Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
  const Told wanted = told_on({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, kWide);
    train(session, 0, 3);
    export_safetensors(session.engine, file);
    import_safetensors(session.engine, file);
    return told_by(session, train(session, 3, 6));
  });
  const EmulatedGpus gpus;
  for (const Tiered& tiered : kTiered) {
    const auto body = [&](const Mesh& mesh) {
      Session session(mesh, below(strategy, tiered), kWide);
      train(session, 0, 3);
      import_safetensors(session.engine, file);
      return told_by(session, train(session, 3, 6));
    };
    expect_same(told_on(late({.ranks = 2}), body), wanted, name_of(tiered));
  }
}

/// In set-up, in a step, and where a record that the GPU gave back is written.
TEST(DeviceOffload, ADiskThatFailsEndsAllRanksAndNamesTheParameter) {
  const EmulatedGpus gpus;
  for (const std::int64_t nth : {2, 30, 75, 120}) {
    const ScopedFaults faults({{.site = FaultSite::kCqe, .nth = nth, .action = FaultAction::kErrno, .number = EIO}});
    try {
      run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
        trained(mesh, below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1), kAllOnNvme), 8, kWide);
      });
      FAIL() << nth << ": no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kIo) << error.message();
      EXPECT_THAT(error.message(),
                  ::testing::AllOf(HasSubstr("rank "), HasSubstr("Input/output error"), HasSubstr("(parameter ")))
          << nth;
    }
  }
}

std::string refusal_of(const Adjust& adjust) {
  return error_of([&] {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_for(ShardingStrategy::kFullShard, adjust, DType::kBF16);
      strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
      strategy.memory.limit_bytes = std::int64_t{1} << 30;
      const Session session(mesh, strategy);
    });
  });
}

TEST(DeviceOffload, WhatCannotLieBelowIsRefusedByName) {
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.masters.tier = Tier::kHost; }),
              HasSubstr("/offload/masters/tier: \"host\" is for a GPU's masters"));
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.moments.tier = Tier::kHost; }),
              HasSubstr("/offload/moments/tier: \"host\" is for a GPU's moments"));
  const EmulatedGpus gpus;
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.moments.tier = Tier::kAuto; }),
              HasSubstr("/offload/moments/tier: how much of a GPU's moments"));
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.parameters.tier = Tier::kNvme; }),
              HasSubstr("/offload/parameters/tier: a GPU's parameters cannot"));
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.gradients = Tier::kNvme; }),
              HasSubstr("/offload/gradients/tier: a GPU's gradients cannot"));
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.masters.tier = Tier::kHost;
                s.offload.moments.tier = Tier::kNvme;
              }),
              HasSubstr("masters and moments move in one record"));
}

}  // namespace
}  // namespace tessera::testing
