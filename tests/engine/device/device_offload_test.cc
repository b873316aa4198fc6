// Tests offloading a GPU's masters and optimizer states to its host's memory and to disk, on an emulated GPU. Training
// gives the same bits as training on the CPU with all state in memory, however late copies arrive, and whichever device
// updates the state in the host's memory. Memory and traffic are as planned, and calls before and after a step find the
// state on its tier.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "engine/memory/records/mapped_carrier.h"
#include "engine/memory/records/slot_carrier.h"
#include "engine/memory/records/tier_carrier.h"
#include "engine/step/queued/offloaded_step.h"
#include "offload/file_tier.h"
#include "offload/files/fault_plan.h"
#include "offload/host_tier.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_offload_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

/// The tiers on which a GPU's state lies.
struct Tiered {
  Tier tier;
  double masters, moments;  ///< share of each kind that is offloaded
  std::int64_t queue_depth;
  std::int64_t record_bytes = 4096;
  std::int64_t cache_bytes = 0;  ///< memory for a cache of records in files
  OffloadedStep step = OffloadedStep::kGpu;
  bool is_by_cpu() const { return step == OffloadedStep::kCpu; }
};
constexpr Tiered kAllOnHost{Tier::kHost, 1, 1, 1}, kAllOnNvme{Tier::kNvme, 1, 1, 1},
    kSomeOnHost{Tier::kHost, 0.3, 0.6, 2}, kSomeOnNvme{Tier::kNvme, 0.6, 0.3, 2, 8192, 20000},
    kAllByCpu{Tier::kHost, 1, 1, 1, 4096, 0, OffloadedStep::kCpu},
    kSomeByCpu{Tier::kHost, 0.4, 0.4, 1, 8192, 0, OffloadedStep::kCpu};
constexpr Tiered kTiered[] = {kAllOnHost, kSomeOnNvme, kSomeOnHost, kAllOnNvme, kAllByCpu, kSomeByCpu};

std::string name_of(const Tiered& tiered) {
  return std::string(tiered.tier == Tier::kHost ? "host " : "nvme ") + std::to_string(tiered.masters) + " " +
         std::to_string(tiered.moments) + ", queue_depth " + std::to_string(tiered.queue_depth) +
         (tiered.is_by_cpu() ? ", by the CPU" : "");
}

Strategy below(Strategy strategy, const Tiered& tiered) {
  const auto state = [&](double fraction) {
    return fraction > 0 ? OffloadedState{tiered.tier, fraction} : OffloadedState{};
  };
  strategy.offload.masters = state(tiered.masters);
  strategy.offload.moments = state(tiered.moments);
  strategy.offload.queue_depth = tiered.queue_depth;
  strategy.offload.record_bytes = tiered.record_bytes;
  if (tiered.tier == Tier::kHost) strategy.offload.step = tiered.step;
  if (tiered.tier != Tier::kNvme) return strategy;
  strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
  strategy.offload.cache_bytes = tiered.cache_bytes;
  return strategy;
}

/// Returns a run whose groups have several records each.
TrainOptions wide_run(const TinyOptions& model = kWide) {
  TrainOptions options = short_run();
  options.model = model;
  options.model.blocks = 2;
  options.steps = 6;
  return options;
}

void expect_the_bits_of(const Trained& on_cpu, const ThreadRanks& ranks, const Strategy& strategy, const Tiered& tiered,
                        const TrainOptions& options, const std::string& what) {
  const auto expect = [&](const ThreadRanks& joined, const std::string& how) {
    const std::string which = what + ", " + name_of(tiered) + how;
    const Trained trained = train_on_threads(joined, below(strategy, tiered), options);
    expect_same_bits(trained, on_cpu, which);
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << which;
    EXPECT_EQ(trained.traffic.streamed_bytes > 0, !tiered.is_by_cpu()) << which;
    EXPECT_EQ(trained.traffic.host_step.to_host > 0, tiered.is_by_cpu()) << which;
    EXPECT_EQ(trained.traffic.host_step.to_gpu > 0, tiered.is_by_cpu()) << which;
    EXPECT_EQ(trained.traffic.disk_bytes_written > 0, tiered.tier == Tier::kNvme) << which;
  };
  {
    const EmulatedGpus gpus;
    expect(late(ranks), "");
    if (ranks.ranks > 1 && tests_are_long()) expect(on_one_gpu(ranks), " on one GPU");
  }
  if (!tiered.is_by_cpu()) return;
  const EmulatedGpus gpus(CopiesRead::kAtOnce);
  expect(late(ranks), ", copies read at once");
}

void expect_the_cpus_bits(const ThreadRanks& ranks, const Strategy& strategy, std::span<const Tiered> all,
                          const TrainOptions& options, const std::string& what) {
  const Trained on_cpu = train_on_threads(ranks, strategy, options);
  for (const Tiered& tiered : all) expect_the_bits_of(on_cpu, ranks, strategy, tiered, options, what);
}

struct Case {
  Kept kept;
  int ranks;
  std::int64_t accumulation;
};
constexpr Case kCases[] = {{{DType::kF32, MasterKind::kSplitBF16, StateDType::kF32}, 1, 1},
                           {{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, 2, 3},
                           {{DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16}, 3, 1},
                           {{DType::kBF16, MasterKind::kF32, StateDType::k8Bit}, 2, 1},
                           {{DType::kF16, MasterKind::kF32, StateDType::kF32}, 2, 1},
                           {{DType::kF16, MasterKind::kF32, StateDType::k8Bit}, 1, 2},
                           {{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32}, 4, 1}};

/// A tier, and the device that updates.
struct By {
  Tier tier;
  OffloadedStep step = OffloadedStep::kGpu;
};
constexpr By kBy[] = {{Tier::kHost}, {Tier::kNvme}, {Tier::kHost, OffloadedStep::kCpu}};

class DeviceOffload : public ::testing::TestWithParam<std::size_t> {};  // index into kCases

TEST_P(DeviceOffload, GivesTheCpusBitsUnderEveryStrategy) {
  const auto [kept, ranks, accumulation] = kCases[GetParam()];
  const auto adjusted = [&](const Placed& placed) {
    Strategy strategy = strategy_of(placed, kept.param, accumulation);
    strategy.mixed_precision.master = kept.master;
    strategy.optimizer.state_dtype = kept.state;
    if (kept.param != DType::kF16) return strategy;
    strategy.mixed_precision.loss_scale.initial = 16777216.0;  // with this scale, the first steps are skipped
    strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
    return strategy;
  };
  std::vector<std::size_t> cases(std::size(kCases));
  std::iota(cases.begin(), cases.end(), std::size_t{0});
  MadeOnce<Trained> on_cpu;
  const auto exists = [](std::size_t, const Placed&, const By& by, double, std::int64_t depth) {
    return by.step == OffloadedStep::kGpu || depth == 1;  // CPU updates move no records, so one depth is enough
  };
  for (const auto& [which, placed, by, share, depth] : pairwise_where(
           exists, cases, kStrategies, kBy, std::array{0.3, 1.0}, std::array{std::int64_t{1}, std::int64_t{4}})) {
    if (which != GetParam()) continue;
    const Strategy strategy = adjusted(placed);
    const ThreadRanks joined{.ranks = kCases[which].ranks};
    const Trained& wanted = on_cpu(name_of(placed), [&] { return train_on_threads(joined, strategy, wide_run()); });
    Tiered tiered{by.tier, share, share, depth};
    tiered.step = by.step;
    if (tiered.is_by_cpu() && share < 1) tiered.record_bytes = 8192;
    expect_the_bits_of(wanted, joined, strategy, tiered, wide_run(), name_of(placed));
  }
  if (ranks < 4) return;
  Strategy hybrid = adjusted(ShardingStrategy::kHybridShard);
  for (const bool world : {false, true}) {
    hybrid.optimizer.shard_over_world = world;
    expect_the_cpus_bits({.ranks = 4, .hosts = 2}, hybrid, kTiered, wide_run(), world ? "hybrid, world" : "hybrid");
  }
}

std::string name_of_case(const ::testing::TestParamInfo<std::size_t>& info) {
  const Case& c = kCases[info.param];
  return std::string(name_of(c.kept.param)) + (c.kept.master == MasterKind::kF32 ? "_whole_" : "_") +
         tessera::name_of(c.kept.state) + "_ranks" + std::to_string(c.ranks) + "_accumulation" +
         std::to_string(c.accumulation);
}

INSTANTIATE_TEST_SUITE_P(All, DeviceOffload, ::testing::Range(std::size_t{0}, std::size(kCases)), name_of_case);

TEST(DeviceOffload, SkippedOverflowsLeaveTheStateUnchanged) {
  Strategy strategy = scheduled(ShardingStrategy::kFullShard, DType::kF16);
  const TrainOptions options = wide_run();
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  EXPECT_TRUE(on_cpu.steps.front().overflow);
  EXPECT_FALSE(on_cpu.steps.back().overflow);
  expect_the_cpus_bits({.ranks = 2}, strategy, kTiered, options, "overflows");
}

/// Runs of elements begin and end inside records, and some parameters are never updated.
TEST(DeviceOffload, UnusedFrozenAndTiedParametersGiveTheCpusBits) {
  MadeOnce<Trained> on_cpu;
  for (const auto& [kind, dtype, tiered] :
       pairwise_of(std::array{ShardingStrategy::kNoShard, ShardingStrategy::kFullShard},
                   std::array{DType::kF32, DType::kBF16}, kTiered)) {
    const Strategy strategy = strategy_of(kind, dtype, 1);
    const std::string what = tessera::name_of(kind) + ", " + std::string(tessera::name_of(dtype));
    const TrainOptions options = wide_run(kAwkward);
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads({.ranks = 2}, strategy, options); });
    expect_the_bits_of(wanted, {.ranks = 2}, strategy, tiered, options, what);
  }
}

TEST(DeviceOffload, EveryRuleGivesTheCpusBits) {
  using enum OptimizerType;
  for (const OptimizerType type : {kSgd, kLion, kAdagrad, kRmsprop}) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
    strategy.optimizer.type = type;
    strategy.optimizer.momentum = 0.9;
    strategy.optimizer.centered = type == kRmsprop;
    expect_the_cpus_bits({.ranks = 2}, strategy, kTiered, wide_run(), tessera::name_of(type));
  }
}

/// Offloaded activations and offloaded state use the same streams.
TEST(DeviceOffload, OffloadedActivationsBesideItGiveTheCpusBits) {
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

/// The device's memory has slots and the state that stays there. The host's memory has all records, or only those that
/// are under way.
TEST(DeviceOffload, MemoryAndTrafficEqualThePlan) {
  const EmulatedGpus gpus;
  for (const Kept& kept : kOneOfEachKind) {
    for (const Tiered& tiered : kTiered) {
      const std::string what = tessera::testing::name_of(kept) + ", " + name_of(tiered);
      run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
        Session session(mesh, below(strategy_of(kept, ShardingStrategy::kFullShard), tiered), kWide);
        const PlannedMemory plan = session.engine.plan();
        EXPECT_EQ(plan.use, session.engine.allocated()) << what;
        EXPECT_EQ(plan.streamed_bytes > 0, !tiered.is_by_cpu()) << what;
        EXPECT_EQ(plan.host_step != HostStepBytes{}, tiered.is_by_cpu()) << what;
        EXPECT_LT(plan.use.limited(), plan.use.total()) << what;
        if (tiered.is_by_cpu()) {
          EXPECT_EQ(plan.use[MemoryCategory::kRecords], 0) << what;
          EXPECT_EQ(plan.disk, DiskUse{}) << what;
          EXPECT_THAT(plan.table, HasSubstr("by the CPU of the host: a step copies ")) << what;
        } else if (tiered.tier == Tier::kHost) {
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
          const TrafficCounts before = session.engine.traffic();
          session.train(i);
          const TrafficCounts after = session.engine.traffic();
          EXPECT_EQ(after.streamed_bytes - before.streamed_bytes, plan.streamed_bytes) << what;
          EXPECT_EQ(after.host_step.to_host - before.host_step.to_host, plan.host_step.to_host) << what;
          EXPECT_EQ(after.host_step.to_gpu - before.host_step.to_gpu, plan.host_step.to_gpu) << what;
        }
        EXPECT_EQ(plan.use, session.engine.allocated()) << what;
      });
    }
  }
}

TEST(DeviceOffload, LogTellsTheStreamingSpeedOfRecords) {
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

/// When backward has ended, the copies of all gradients to the host have begun. No other copies have begun, since a
/// program may write parameters until the step.
TEST(DeviceOffload, GradientsMoveToTheHostDuringBackward) {
  const EmulatedGpus gpus;
  for (const int ranks : {1, 2}) {
    for (const std::int64_t accumulation : {1, 3}) {
      run_ranks(late({.ranks = ranks}), [&](const Mesh& mesh) {
        Session session(mesh, below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, accumulation), kAllByCpu),
                        kWide);
        const HostStepBytes planned = session.engine.plan().host_step;
        for (std::size_t i = 0; i < 3; ++i) {
          const HostStepBytes before = session.engine.traffic().host_step;
          for (std::int64_t m = 0; m < accumulation; ++m) {
            EXPECT_EQ(session.engine.traffic().host_step, before) << "a sum of all microbatches is one";
            session.engine.backward(
                session.loss(i * static_cast<std::size_t>(accumulation) + static_cast<std::size_t>(m)));
          }
          const HostStepBytes ready = session.engine.traffic().host_step;
          EXPECT_EQ(ready.to_host - before.to_host, planned.to_host - planned.to_gpu) << "of split masters";
          EXPECT_EQ(ready.to_gpu, before.to_gpu);
          session.engine.step();
          const HostStepBytes done = session.engine.traffic().host_step;
          EXPECT_EQ(done.to_host - before.to_host, planned.to_host);
          EXPECT_EQ(done.to_gpu - ready.to_gpu, planned.to_gpu);
        }
      });
    }
  }
}

TEST(DeviceOffload, ParametersWrittenBetweenBackwardAndStepAreUpdated) {
  const auto body = [&](const Strategy& own) {
    return [&](const Mesh& mesh) {
      Session session(mesh, own, kWide);
      std::vector<StepResult> steps = train(session, 0, 2);
      session.engine.backward(session.loss(2));
      {
        const at::NoGradGuard no_grad;
        const Gathered guard(session.engine, Gathered::kWrite);
        for (at::Tensor& parameter : session.model->parameters()) parameter.mul_(0.5);
      }
      steps.push_back(session.engine.step());
      for (StepResult& step : train(session, 3, 5)) steps.push_back(step);
      return told_by(session, std::move(steps));
    };
  };
  MadeOnce<Told> on_cpu;
  for (const auto& [dtype, read, tiered] : pairwise_of(std::array{DType::kF32, DType::kBF16},
                                                       std::array{CopiesRead::kLate, CopiesRead::kAtOnce}, kTiered)) {
    const Strategy strategy = strategy_of(ShardingStrategy::kFullShard, dtype, 1);
    const std::string what(tessera::name_of(dtype));
    const Told& wanted = on_cpu(what, [&] { return told_on({.ranks = 2}, body(strategy)); });
    const EmulatedGpus gpus(read);
    const Strategy own = below(strategy, tiered);
    expect_same(told_on(late({.ranks = 2}), body(own)), wanted, what + ", " + name_of(tiered));
  }
}

/// Results have the same bits, whichever device is chosen.
TEST(DeviceOffload, ChoiceOfDeviceIsMeasuredAndLogged) {
  const Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, wide_run());
  const EmulatedGpus gpus;
  Tiered open = kAllByCpu;
  open.step = OffloadedStep::kAuto;
  const std::string said = stderr_of([&] {
    const Trained trained = train_on_threads(late({.ranks = 2}), below(strategy, open), wide_run());
    expect_same_bits(trained, on_cpu, "auto");
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end);
    EXPECT_NE(trained.traffic.streamed_bytes > 0, trained.traffic.host_step.to_host > 0);
  });
  EXPECT_THAT(said,
              ContainsRegex("offload.step auto: masters and moments in the host's memory are updated by the (CPU "
                            "there|GPU). Measured now, on rank 0: .* to the host, .* to the GPU, .* each way at "
                            "once, and the CPU updates [0-9.]+ elements/s; so on the slowest rank a step needs at "
                            "most [0-9.]+ s with the CPU, and [0-9.]+ s with the GPU"));
  open.masters = 0.5;
  EXPECT_THAT(stderr_of([&] { train_on_threads({.ranks = 2}, below(strategy, open), wide_run()); }),
              HasSubstr("are updated by the GPU, since some elements have only one of the two there"));
  open.masters = 1;
  Strategy limited = below(strategy, open);
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Session session(mesh, below(strategy, kAllByCpu), wide_run().model);
    if (mesh.rank() == 0) limited.memory.limit_bytes = session.engine.plan().use.limited();
  });
  EXPECT_THAT(stderr_of([&] { train_on_threads({.ranks = 2}, limited, wide_run()); }),
              HasSubstr("are updated by the CPU there, since memory.limit leaves no room for them on the GPU"));
}

/// A plan makes the same choice as the Engine. A plan measures nothing, so only memory decides.
TEST(DeviceOffload, AutoPlansCpuUpdatesWhereOnlyTheyFit) {
  Strategy strategy = below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1), kAllByCpu);
  strategy.comm.transport = TransportChoice::kCudaHost;
  Topology topology;
  topology.world_size = topology.local_world_size = 2;
  const auto plan = [&](OffloadedStep step, std::int64_t limit) {
    strategy.offload.step = step;
    strategy.memory.limit_bytes = limit;
    return plan_memory(*make_tiny(kWide, true), strategy, topology);
  };
  const MemoryUse on_cpu = plan(OffloadedStep::kCpu, 0).use, on_gpu = plan(OffloadedStep::kGpu, 0).use;
  ASSERT_LT(on_cpu.limited(), on_gpu.limited());
  EXPECT_EQ(plan(OffloadedStep::kAuto, 0).use, on_gpu);
  EXPECT_EQ(plan(OffloadedStep::kAuto, on_gpu.limited()).use, on_gpu);
  EXPECT_EQ(plan(OffloadedStep::kAuto, on_cpu.limited()).use, on_cpu);
  EXPECT_EQ(plan(OffloadedStep::kAuto, on_cpu.limited() - 1).use, on_gpu) << "neither fits";
  // Tiers "auto" are chosen for the device that updates.
  strategy.offload.masters.tier = strategy.offload.moments.tier = Tier::kAuto;
  const std::int64_t limit = on_gpu.limited() - 1;
  EXPECT_EQ(plan(OffloadedStep::kAuto, limit).use, plan(OffloadedStep::kCpu, limit).use);
  EXPECT_LT(plan(OffloadedStep::kAuto, limit).use[MemoryCategory::kHostRecords], on_cpu[MemoryCategory::kHostRecords]);
}

/// The strategy has rates of groups, a rate that the program sets, and a limit on gradients' values.
TEST(DeviceOffload, GroupsAndRatesSetByHandGiveTheCpusBits) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
  strategy.gradient_clipping = 0;
  strategy.gradient_clip_value = 0.01;
  strategy.lr_schedule = {.type = LrScheduleType::kManual};
  ParameterGroup group;
  group.max_dim = 1;
  group.name = "vectors";
  group.lr_ratio = 0.5;
  group.weight_decay = 0.0;
  strategy.optimizer.groups = {group};
  const auto body = [&](const Strategy& own) {
    return [&](const Mesh& mesh) {
      Session session(mesh, own, kWide);
      std::vector<StepResult> steps = train(session, 0, 3);
      session.engine.set_lr("vectors", 0.003);
      for (StepResult& step : train(session, 3, 6)) steps.push_back(step);
      return told_by(session, std::move(steps));
    };
  };
  const Told wanted = told_on({.ranks = 2}, body(strategy));
  const EmulatedGpus gpus;
  for (const Tiered& tiered : kTiered) {
    expect_same(told_on(late({.ranks = 2}), body(below(strategy, tiered))), wanted, name_of(tiered));
  }
}

/// New parameters are copied to the GPU while the next parameters are updated. Everything else is done in sequence.
TEST(DeviceOffload, EstimatedSecondsCoverTransfersAndUpdates) {
  constexpr std::int64_t kNumel = 1 << 20;
  PlanInput input;
  input.units.push_back({.name = "root", .groups = {{DType::kF32, true, Layout::pack({&kNumel, 1}, 1)}}});
  input.placement = placement_of(ShardingStrategy::kFullShard, false);
  input.placement.is_queued = true;
  input.tiers.moments = {Tier::kHost, 1.0};
  input.tiers.step = OffloadedStep::kGpu;
  const MemoryPlan on_gpu(input);
  input.tiers.step = OffloadedStep::kCpu;
  const MemoryPlan on_cpu(input);
  constexpr double kParameters = 4.0 * kNumel;
  const auto records = static_cast<double>(on_gpu.records().streamed_bytes);
  OffloadSpeeds speeds{.to_gpu = 2e9, .to_host = 1e9, .both_ways = 4e9, .updated = 1e9};
  EXPECT_EQ(seconds_of(speeds, on_cpu, on_gpu).on_gpu, records / 4e9);
  EXPECT_EQ(seconds_of(speeds, on_cpu, on_gpu).on_cpu, 2 * kParameters / 1e9 + kParameters / 2e9);
  speeds.updated = 1e8;
  EXPECT_EQ(seconds_of(speeds, on_cpu, on_gpu).on_cpu, 2 * kParameters / 1e9 + kNumel / 1e8);
}

/// State in the host's memory does not count towards the limit.
TEST(DeviceOffload, MemoryLimitCountsOnlyTheDevice) {
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

/// Returns the bytes of rank 0's plan that memory.limit counts.
std::int64_t limited_bytes(const ThreadRanks& ranks, const Strategy& strategy, const TinyOptions& model) {
  std::int64_t bytes = 0;
  run_ranks(ranks, [&](const Mesh& mesh) {
    const Session session(mesh, strategy, model);
    if (mesh.rank() == 0) bytes = session.engine.plan().use.limited();
  });
  return bytes;
}

TEST(DeviceOffload, AutoOffloadsWhatExceedsTheLimit) {
  const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
  const TrainOptions options = wide_run();
  const std::string folder = std::filesystem::temp_directory_path().string();
  using enum ShardingStrategy;
  for (const ShardingStrategy kind : {kNoShard, kShardGradients, kFullShard, kHybridShard}) {
    const ThreadRanks ranks = kind == kHybridShard ? ThreadRanks{.ranks = 4, .hosts = 2} : ThreadRanks{.ranks = 2};
    const Strategy plain = strategy_of(kept, kind);
    const Trained on_cpu = train_on_threads(ranks, plain, options);
    const EmulatedGpus gpus;
    for (const bool in_files : {false, true}) {
      for (const OffloadedStep step : {OffloadedStep::kGpu, OffloadedStep::kCpu}) {
        if (in_files && step == OffloadedStep::kCpu) continue;
        const std::string which = name_of(kind) + (in_files ? " in files, by " : " on the host, by ") +
                                  (step == OffloadedStep::kCpu ? "the CPU" : "the GPU");
        Strategy strategy = plain;
        strategy.offload.record_bytes = 4096;
        strategy.offload.queue_depth = 1;
        const auto limited = [&](const Strategy& given) { return limited_bytes(ranks, given, options.model); };
        const std::int64_t most = limited(strategy);
        if (in_files) strategy.offload.paths = {folder};
        if (!in_files) strategy.offload.step = step;
        strategy.offload.masters.tier = strategy.offload.moments.tier = in_files ? Tier::kNvme : Tier::kHost;
        const std::int64_t least = limited(strategy);
        ASSERT_LT(least, most) << which;
        strategy.offload.masters.tier = strategy.offload.moments.tier = Tier::kAuto;
        strategy.memory.limit_bytes = most;
        EXPECT_EQ(limited(strategy), most) << which << ": all of it has room";
        strategy.memory.limit_bytes = (most + least) / 2;
        EXPECT_LE(limited(strategy), strategy.memory.limit_bytes) << which;
        const Trained trained = train_on_threads(late(ranks), strategy, options);
        expect_same_bits(trained, on_cpu, which);
        EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << which;
        EXPECT_EQ(trained.traffic.disk_bytes_written > 0, in_files) << which;
        EXPECT_EQ(trained.traffic.streamed_bytes > 0, step == OffloadedStep::kGpu) << which;
        EXPECT_EQ(trained.traffic.host_step.to_host > 0, step == OffloadedStep::kCpu) << which;
      }
    }
  }
}

TEST(DeviceOffload, DifferentOffloadPathsOnRanksAreRefused) {
  const EmulatedGpus gpus;
  const std::string told = error_of([&] {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
      strategy.offload.moments.tier = Tier::kAuto;
      strategy.memory.limit_bytes = std::int64_t{1} << 30;
      if (mesh.rank() == 1) strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
      const Session session(mesh, strategy);
    });
  });
  EXPECT_THAT(told, HasSubstr("ranks have different strategies"));
  EXPECT_THAT(told, HasSubstr("/offload/paths"));
}

TEST(DeviceOffload, WeightAveragesGiveTheCpusBits) {
  const auto body = [](const Strategy& own) {
    return [&](const Mesh& mesh) {
      Session session(mesh, own, kWide);
      std::vector<StepResult> steps = train(session, 0, 4);
      { const Gathered looks(session.engine, Gathered::kEma); }
      for (StepResult& step : train(session, 4, 7)) steps.push_back(step);
      return told_by(session, std::move(steps));
    };
  };
  MadeOnce<Told> on_cpu;
  for (const auto& [dtype, kind, tiered] : pairwise_of(std::array{DType::kF32, DType::kBF16}, kThree, kTiered)) {
    Strategy strategy = strategy_of(kind, dtype, 1);
    strategy.ema.decay = 0.75;
    const std::string what = tessera::name_of(kind) + ", " + std::string(tessera::name_of(dtype));
    const Told& wanted = on_cpu(what, [&] { return told_on({.ranks = 2}, body(strategy)); });
    const EmulatedGpus gpus;
    const Strategy own = below(strategy, tiered);
    expect_same(told_on(late({.ranks = 2}), body(own)), wanted, what + ", " + name_of(tiered));
  }
}

/// Returns a strategy with a memory limit. Half of the state that may go to the host does not fit on the GPU.
Strategy with_too_little_room(const Strategy& strategy) {
  const auto limited = [&](const Strategy& given) { return limited_bytes({.ranks = 2}, given, kWide); };
  Strategy open = below(strategy, kAllOnHost);
  open.memory.limit_bytes = (limited(strategy) + limited(open)) / 2;
  open.offload.masters = open.offload.moments = {Tier::kAuto, 1.0};
  open.offload.step = OffloadedStep::kAuto;
  return open;
}

/// Checks that `body` leaves the same values on GPUs with each tier as on the CPU with all state in memory.
void expect_values_as_on_the_cpu(const std::function<Values(const Mesh&, const Strategy&)>& body) {
  const auto run = [&](const ThreadRanks& ranks, const Strategy& own) {
    return told_on(ranks, [&](const Mesh& mesh) { return Told{{}, body(mesh, own), {}}; });
  };
  std::vector<const Tiered*> all = {nullptr};  // null stands for with_too_little_room
  for (const Tiered& tiered : kTiered) all.push_back(&tiered);
  MadeOnce<Told> on_cpu;
  for (const auto& [kept, kind, tiered] : pairwise_of<2>(kOneOfEachKind, kThree, all)) {
    const Strategy strategy = strategy_of(kept, kind);
    const std::string what = tessera::testing::name_of(kept) + ", " + tessera::name_of(kind);
    const Told& wanted = on_cpu(what, [&] { return run({.ranks = 2}, strategy); });
    const EmulatedGpus gpus;
    const Strategy own = tiered ? below(strategy, *tiered) : with_too_little_room(strategy);
    expect_same(run(late({.ranks = 2}), own), wanted, what + ", " + (tiered ? name_of(*tiered) : "auto"));
  }
}

TEST(DeviceOffload, WritesUnderGatheredReachTheRecords) { expect_values_as_on_the_cpu(&written_under_gathered); }

TEST(DeviceOffload, NextEngineTakesMastersFromTheRecords) { expect_values_as_on_the_cpu(&trained_by_two_engines); }

TEST(DeviceOffload, StatesAreCarriedWhenFreezingChanges) {
  expect_values_as_on_the_cpu(&trained_with_weights_frozen_for_a_while);
}

TEST(DeviceOffload, ReplicaHashesCoverOffloadedState) {
  expect_values_as_on_the_cpu([](const Mesh& mesh, const Strategy& given) {
    Strategy strategy = given;
    strategy.check.replica_hash_every = 1;
    return trained(mesh, strategy, 3, kWide);
  });
}

/// Checkpoints are saved on one device and tier, and loaded on another.
TEST(DeviceOffload, CheckpointsMoveBetweenTiersAndDevices) {
  std::vector<std::string> inexact;
  const auto save = [&](const Strategy& strategy, const TestFolder& folder) {
    return [&](const Mesh& mesh) { return saved_and_trained_on(mesh, strategy, folder.path().string()); };
  };
  const auto load = [&](const Strategy& strategy, const TestFolder& folder) {
    return [&](const Mesh& mesh) { return loaded_and_trained_on(mesh, strategy, folder.path().string(), inexact); };
  };
  struct SavedByCpu {
    std::shared_ptr<TestFolder> folder;
    Told told;
  };
  MadeOnce<SavedByCpu> on_cpu;
  for (const auto& [beside_training, kept, tiered] : pairwise_of<2>(std::array{false, true}, kOneOfEachKind, kTiered)) {
    Strategy strategy = scheduled(ShardingStrategy::kFullShard, kept.param);
    strategy.mixed_precision.master = kept.master;
    strategy.optimizer.state_dtype = kept.state;
    strategy.checkpoint.async = beside_training;
    const std::string of = tessera::testing::name_of(kept) + (beside_training ? ", saved beside training" : "");
    const auto& [of_cpu, wanted] = on_cpu(of, [&] {
      const auto folder = std::make_shared<TestFolder>();
      return SavedByCpu{folder, told_on({.ranks = 2}, save(strategy, *folder))};
    });
    const std::string what = of + ", " + name_of(tiered);
    const Strategy own = below(strategy, tiered), other = below(strategy, kSomeOnHost);
    const TestFolder of_gpu;
    {
      const EmulatedGpus gpus;
      expect_same(told_on(late({.ranks = 2}), save(own, of_gpu)), wanted, what + ": saved");
      expect_same(told_on(late({.ranks = 2}), load(own, of_gpu)), wanted, what + ": loaded");
      EXPECT_TRUE(inexact.empty()) << what;
      expect_same(told_on(late({.ranks = 2}), load(other, of_gpu)), wanted, what + ": loaded on another tier");
      expect_same(told_on(late({.ranks = 2}), load(own, *of_cpu)), wanted, what + ": loaded what the CPU saved");
    }
    expect_same(told_on({.ranks = 2}, load(strategy, of_gpu)), wanted, what + ": loaded by the CPU");
  }
}

TEST(DeviceOffload, ImportedSafetensorsGiveTheCpusBits) {
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

/// The disk fails in set-up, in a step, and when a record that the GPU has returned is written.
TEST(DeviceOffload, FailedDiskEndsAllRanksAndNamesTheParameter) {
  const EmulatedGpus gpus;
  for (const std::int64_t nth : {2, 30, 75, 120}) {
    const ScopedFaults faults({{.site = FaultSite::kCqe, .nth = nth, .action = FaultAction::kErrno, .number = EIO}});
    std::string told;
    try {
      run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
        trained(mesh, below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1), kAllOnNvme), 8, kWide);
      });
    } catch (const c10::Error& error) {
      // An operator that needs values of the rank that has failed throws an error of LibTorch, with the same text.
      const auto* const own = dynamic_cast<const Error*>(&error);
      EXPECT_TRUE(own == nullptr || own->exit_code() == ExitCode::kIo) << nth;
      told = error.what();
    }
    EXPECT_THAT(told, ::testing::AllOf(HasSubstr("rank "), HasSubstr("Input/output error"),
                                       ContainsRegex("[(](parameter|padding of unit) ")))
        << nth;
  }
}

std::string refusal_of(const Adjust& adjust) {
  return error_of([&] {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      const auto with_room = [&](Strategy& strategy) {
        strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
        strategy.memory.limit_bytes = std::int64_t{1} << 30;
        adjust(strategy);
      };
      const Session session(mesh, strategy_for(ShardingStrategy::kFullShard, with_room, DType::kBF16));
    });
  });
}

TEST(DeviceOffload, UnsupportedTiersAreRefusedByName) {
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.masters.tier = Tier::kHost; }),
              HasSubstr("/offload/masters/tier: \"host\" is for a GPU's masters"));
  EXPECT_THAT(refusal_of([](Strategy& s) { s.offload.moments.tier = Tier::kHost; }),
              HasSubstr("/offload/moments/tier: \"host\" is for a GPU's moments"));
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.moments.tier = Tier::kAuto;
                s.offload.paths.clear();
              }),
              HasSubstr("/offload/moments/tier: \"auto\" needs \"paths\" where the CPU trains"));
  const EmulatedGpus gpus;
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.moments.tier = Tier::kAuto;
                s.offload.paths.clear();
                s.offload.cache_bytes = 1 << 20;
              }),
              HasSubstr("/offload/cache: there are no files"));
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.masters.tier = Tier::kHost;
                s.offload.moments.tier = Tier::kNvme;
              }),
              HasSubstr("masters and moments move in one record"));
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.masters = s.offload.moments = {Tier::kHost, 0.5};
                s.offload.moments.fraction = 1;
                s.offload.record_bytes = 4096;
                s.offload.step = OffloadedStep::kCpu;
              }),
              HasSubstr("/offload/step: \"cpu\" updates elements whose masters and moments both lie"));
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.moments.tier = Tier::kHost;
                s.offload.step = OffloadedStep::kCpu;
              }),
              HasSubstr("one fraction, or take \"gpu\""));
  EXPECT_THAT(refusal_of([](Strategy& s) {
                s.offload.masters = s.offload.moments = {Tier::kNvme, 1.0};
                s.offload.step = OffloadedStep::kCpu;
              }),
              HasSubstr("/offload/step: \"cpu\" updates a GPU's masters and moments that lie in its host's memory"));
}

/// Four records in pinned memory of the emulated device's host, and three slots on the device.
struct Carried {
  static constexpr std::int64_t kBytes = 64;

  explicit Carried(CopiesRead read) : kernels(emulated_kernels(read)) {
    HostTierOptions options;
    options.records = 4;
    options.record_bytes = kBytes;
    options.who = "test";
    options.give = [this](std::size_t bytes) { return kernels->pinned_memory(bytes); };
    tier = std::make_shared<TierCarrier>(HostTier::create(options).value());
    carrier = std::make_unique<SlotCarrier>(tier, *kernels, SlotCarrier::Slots{slots.data(), kBytes, 3, 1},
                                            /*are_in_files=*/false);
  }
  std::byte on_host(std::int64_t record) const {
    std::byte value{};
    tier->visit(record, /*updates=*/false, [&](const std::byte* memory) { value = memory[0]; });
    return value;
  }
  void change(std::int64_t record, std::byte value, bool fails = false) const {
    Lease lease = carrier->acquire(record, LeaseUse::kChange);
    lease.bytes()[0] = value;
    if (fails) throw std::runtime_error("a rule failed");
    lease.give_back();
  }

  const std::unique_ptr<DeviceKernels> kernels;
  std::vector<std::byte> slots = std::vector<std::byte>(3 * kBytes);
  std::shared_ptr<TierCarrier> tier;
  std::unique_ptr<SlotCarrier> carrier;
};

TEST(SlotCarrier, RecordsGoBackWhicheverLeaseEndsFirst) {
  for (const CopiesRead read : {CopiesRead::kLate, CopiesRead::kAtOnce}) {
    const Carried carried(read);
    const std::array<std::int64_t, 3> order{0, 1, 2};
    carried.carrier->announce(order);
    Lease first = carried.carrier->acquire(0, LeaseUse::kChange);
    Lease second = carried.carrier->acquire(1, LeaseUse::kChange);
    first.bytes()[0] = std::byte{10};
    second.bytes()[0] = std::byte{11};
    second.give_back();
    first.give_back();
    carried.change(2, std::byte{12});
    carried.carrier->flush();
    EXPECT_EQ(carried.on_host(0), std::byte{10});
    EXPECT_EQ(carried.on_host(1), std::byte{11});
    EXPECT_EQ(carried.on_host(2), std::byte{12});
    EXPECT_EQ(carried.on_host(3), std::byte{0});
    EXPECT_EQ(carried.carrier->uploaded_bytes(), 3 * Carried::kBytes);
  }
}

// If a failure comes while work is queued, the host keeps the old values, and later records can use the slots.
TEST(SlotCarrier, DroppedRecordKeepsItsValuesOnTheHost) {
  for (const CopiesRead read : {CopiesRead::kLate, CopiesRead::kAtOnce}) {
    const Carried carried(read);
    carried.change(1, std::byte{5});
    EXPECT_THROW(carried.change(1, std::byte{6}, /*fails=*/true), std::runtime_error);
    EXPECT_THROW(carried.change(2, std::byte{7}, /*fails=*/true), std::runtime_error);
    EXPECT_EQ(carried.on_host(1), std::byte{5});
    EXPECT_EQ(carried.on_host(2), std::byte{0});
    for (unsigned char record = 0; record < 4; ++record)
      carried.change(record, std::byte{static_cast<unsigned char>(20 + record)});
    for (unsigned char record = 0; record < 4; ++record)
      EXPECT_EQ(carried.on_host(record), std::byte{static_cast<unsigned char>(20 + record)}) << int{record};
    EXPECT_EQ(carried.carrier->uploaded_bytes(), 5 * Carried::kBytes);
  }
}

/// Makes four records in files. Three of them may be held at a time, in pinned memory.
std::shared_ptr<TierCarrier> in_files(const TestFolder& folder, DeviceKernels& kernels) {
  FileTierOptions options;
  options.records = 4;
  options.record_bytes = 4096;
  options.who = "test";
  options.paths = {{folder.path().string()}};
  options.read_ahead = options.write_behind = 1;
  options.most_held = 3;
  options.memory = [&kernels](std::size_t bytes) { return kernels.pinned_memory(bytes); };
  return std::make_shared<TierCarrier>(FileTier::create(options).value());
}

/// Acquires two records of `carrier` to read them, and then changes the first one although it was acquired only to be
/// read. Returns the number of records that the tier wrote.
std::int64_t written_after_late_change(Carrier& carrier, TierCarrier& tier) {
  Lease changed = carrier.acquire(1, LeaseUse::kRead);
  Lease read = carrier.acquire(2, LeaseUse::kRead);
  changed.bytes()[0] = std::byte{7};
  changed.change();
  changed.give_back();
  read.give_back();
  tier.settle();
  carrier.flush();
  tier.visit(1, /*updates=*/false, [](const std::byte* memory) { EXPECT_EQ(memory[0], std::byte{7}); });
  return tier.counters().writes;
}

// A lease that was taken to read a record may be changed into a lease that writes the record (Lease::change).
TEST(CarriersToADevice, RecordInAFileThatALeaseChangedAfterAllIsWritten) {
  const std::unique_ptr<DeviceKernels> kernels = emulated_kernels(CopiesRead::kAtOnce);
  {
    const TestFolder folder;
    const auto tier = in_files(folder, *kernels);
    std::vector<std::byte> slots(std::size_t{3} * 4096);
    SlotCarrier carrier(tier, *kernels, {slots.data(), 4096, 3, 1}, /*are_in_files=*/true);
    EXPECT_EQ(written_after_late_change(carrier, *tier), 1) << "through slots";
  }
  const TestFolder folder;
  const auto tier = in_files(folder, *kernels);
  MappedCarrier carrier(tier, *kernels, /*held=*/3, /*are_in_files=*/true);
  EXPECT_EQ(written_after_late_change(carrier, *tier), 1) << "in place";
}

}  // namespace device_offload_test
}  // namespace tessera::testing
