// Tests offloading a GPU's parameters to its host's memory and to disk, on an emulated GPU. Training gives the same
// bits as training on the CPU with all state in memory, whichever device updates the parameters and on whichever tiers
// masters and states lie. Memory and traffic are as planned, and calls around a step find parameters on their tier.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "lying.h"
#include "offload/files/fault_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_parameters_test {

using ::testing::HasSubstr;

void expect_the_bits_of(const Trained& on_cpu, const ThreadRanks& ranks, const Strategy& strategy, const Lying& lying,
                        CopiesRead read, const TrainOptions& options, const std::string& which) {
  const EmulatedGpus gpus(read);
  const Trained trained = train_on_threads(late(ranks), below(strategy, lying), options);
  expect_same_bits(trained, on_cpu, which);
  for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << which;
  EXPECT_GT(trained.traffic.uploaded_bytes, 0) << which;
  EXPECT_EQ(trained.traffic.disk_bytes_written > 0, lying.is_in_files()) << which;
}

constexpr CopiesRead kReads[] = {CopiesRead::kLate, CopiesRead::kAtOnce};

TEST(DeviceParameters, TrainingGivesTheCpusBits) {
  const std::pair<int, TinyOptions> kRuns[] = {{1, kWide}, {2, kWide}, {2, kAwkward}, {3, kWide}};
  MadeOnce<Trained> on_cpu;
  for (const auto& [kept, run, lying, read] : pairwise_of(sampled_kept(), kRuns, kLying, kReads)) {
    const ThreadRanks ranks{.ranks = run.first};
    const TrainOptions options = run_of(run.second);
    Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard);
    strategy.mixed_precision.loss_scale.initial = 16777216.0;  // with this scale, fp16 skips the first steps
    strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
    const std::string what = tessera::testing::name_of(kept) + " on " + std::to_string(run.first) + " ranks" +
                             (run.second.unused_block ? ", awkward" : "");
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads(ranks, strategy, options); });
    expect_the_bits_of(wanted, ranks, strategy, lying, read, options, what + ", " + name_of(lying));
  }
}

TEST(DeviceParameters, ReplicasGiveTheCpusBits) {
  Strategy strategy = strategy_of(kKept[3], ShardingStrategy::kHybridShard);
  strategy.mesh.replicate = 2;
  const TrainOptions options = run_of(kWide);
  const Trained on_cpu = train_on_threads({.ranks = 4}, strategy, options);
  for (const auto& [lying, read] : pairwise_of<1>(kLying, kReads))
    expect_the_bits_of(on_cpu, {.ranks = 4}, strategy, lying, read, options, "hybrid, " + name_of(lying));
}

TEST(DeviceParameters, PrefetchAndAccumulationChangeNothing) {
  constexpr std::int64_t kPrefetches[] = {0, 3};
  const TrainOptions options = run_of(kWide);
  MadeOnce<Trained> on_cpu;
  for (const auto& [prefetch, read, lying] : pairwise_of(kPrefetches, kReads, kLying)) {
    Strategy strategy = strategy_of(kKept[0], ShardingStrategy::kFullShard);
    strategy.prefetch = prefetch;
    strategy.gradient_accumulation = 2;
    const std::string what = "prefetch " + std::to_string(prefetch);
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads({.ranks = 2}, strategy, options); });
    expect_the_bits_of(wanted, {.ranks = 2}, strategy, lying, read, options, what + ", " + name_of(lying));
  }
}

/// The bits are the same for every transport that joins the ranks.
TEST(DeviceParameters, EveryTransportGivesTheCpusBits) {
  const Strategy strategy = strategy_of(kKept[2], ShardingStrategy::kFullShard);
  const TrainOptions options = run_of(kWide);
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  const EmulatedGpus gpus;
  on_gpus(2, [&](const ThreadRanks& joined, const std::string& what) {
    for (const Lying& lying : {kHostAll, kByCpu, kFilesAll}) {
      expect_same_bits(train_on_threads(joined, below(strategy, lying), options), on_cpu, what + name_of(lying));
    }
  });
}

TEST(DeviceParameters, MemoryAndTrafficEqualThePlan) {
  const EmulatedGpus gpus;
  for (const auto& each : pairwise_of(kOneOfEachKind, kLying, std::array{1, 2})) {
    const Kept& kept = std::get<0>(each);
    const Lying& lying = std::get<1>(each);
    const int ranks = std::get<2>(each);
    const std::string what = tessera::testing::name_of(kept) + ", " + name_of(lying);
    run_ranks(late({.ranks = ranks}), [&](const Mesh& mesh) {
      const Strategy plain = strategy_of(kept, ShardingStrategy::kFullShard);
      Session session(mesh, below(plain, lying), {.vocab = 32, .width = 32, .hidden = 64, .blocks = 5});
      const PlannedMemory plan = session.engine.plan();
      EXPECT_EQ(plan.use, session.engine.allocated()) << what;
      EXPECT_GT(plan.uploaded_bytes, 0) << what;
      EXPECT_THAT(plan.table, HasSubstr("to the GPU: a step copies ")) << what;
      if (lying.parameters.fraction == 1) {
        EXPECT_EQ(plan.use[MemoryCategory::kParameters], 0) << what;
      }
      expect_planned_traffic(session, lying, what);
      if (lying.is_by_cpu() && lying.parameters.fraction == 1) {
        EXPECT_EQ(plan.host_step.to_gpu, 0) << what << ": updated where gathers find them";
      }
    });
  }
}

/// Programs write parameters under Gathered, give them to a second Engine, and freeze them for a while. They also save
/// them on one tier and load them on another.
TEST(DeviceParameters, CallsAroundAStepFindOffloadedParameters) {
  using Body = std::function<Values(const Mesh&, const Strategy&)>;
  const Body bodies[] = {&written_under_gathered, &trained_by_two_engines, &trained_with_weights_frozen_for_a_while,
                         [](const Mesh& mesh, const Strategy& given) {
                           Strategy strategy = given;
                           strategy.check.replica_hash_every = 1;
                           strategy.ema.decay = 0.75;
                           Session session(mesh, strategy, kWide);
                           train(session, 0, 3);
                           { const Gathered looks(session.engine, Gathered::kEma); }
                           train(session, 3, 5);
                           return session.values();
                         }};
  MadeOnce<Told> on_cpu;
  for (const auto& [kept, program, lying] : pairwise_of(kOneOfEachKind, std::array{0, 1, 2, 3}, kLying)) {
    const Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard);
    const Body& body = bodies[program];
    const auto run = [&](const ThreadRanks& ranks, const Strategy& own) {
      return told_on(ranks, [&](const Mesh& mesh) { return Told{{}, body(mesh, own), {}}; });
    };
    const std::string what = tessera::testing::name_of(kept) + ", program " + std::to_string(program);
    const Told& wanted = on_cpu(what, [&] { return run({.ranks = 2}, strategy); });
    const EmulatedGpus gpus;
    expect_same(run(late({.ranks = 2}), below(strategy, lying)), wanted, what + ", " + name_of(lying));
  }
}

TEST(DeviceParameters, CheckpointsMoveBetweenTiersAndDevices) {
  std::vector<std::string> inexact;
  const auto save = [&](const Strategy& strategy, const TestFolder& folder) {
    return [&](const Mesh& mesh) { return saved_and_trained_on(mesh, strategy, folder.path().string()); };
  };
  const auto load = [&](const Strategy& strategy, const TestFolder& folder) {
    return [&](const Mesh& mesh) { return loaded_and_trained_on(mesh, strategy, folder.path().string(), inexact); };
  };
  std::size_t turn = 0;  // each place is tested with one of the dtypes, in long tests with both
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Strategy strategy = scheduled(ShardingStrategy::kFullShard, dtype);
    const TestFolder of_cpu;
    const Told wanted = told_on({.ranks = 2}, save(strategy, of_cpu));
    for (const Lying& lying : kLying) {
      if (turn++ % 2 == 1 && !tests_are_long()) continue;
      const Strategy own = below(strategy, lying);
      const TestFolder of_gpu;
      {
        const EmulatedGpus gpus;
        expect_same(told_on(late({.ranks = 2}), save(own, of_gpu)), wanted, name_of(lying) + ": saved");
        expect_same(told_on(late({.ranks = 2}), load(own, of_gpu)), wanted, name_of(lying) + ": loaded");
        EXPECT_TRUE(inexact.empty()) << name_of(lying);
        expect_same(told_on(late({.ranks = 2}), load(own, of_cpu)), wanted, name_of(lying) + ": loaded the CPU's");
      }
      expect_same(told_on({.ranks = 2}, load(strategy, of_gpu)), wanted, name_of(lying) + ": loaded by the CPU");
    }
  }
}

/// Moments are offloaded first, then masters, then parameters.
TEST(DeviceParameters, AutoOffloadsWhatExceedsTheLimit) {
  const Strategy plain = strategy_of(kKept[2], ShardingStrategy::kFullShard);
  TrainOptions options = run_of(kWide);
  options.model.width = 64, options.model.hidden = 256, options.model.blocks = 8;  // larger than pages and slots
  const Trained on_cpu = train_on_threads({.ranks = 2}, plain, options);
  const EmulatedGpus gpus;
  for (const bool in_files : {false, true}) {
    Strategy strategy = plain;
    strategy.offload.record_bytes = 4096;
    strategy.offload.queue_depth = 1;
    if (in_files) strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
    if (!in_files) strategy.offload.step = OffloadedStep::kGpu;
    const auto limited = [&](Tier states, Tier parameters) {
      std::int64_t bytes = 0;
      strategy.offload.masters.tier = strategy.offload.moments.tier = states;
      strategy.offload.parameters.tier = parameters;
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        const Session session(mesh, strategy, options.model);
        if (mesh.rank() == 0) bytes = session.engine.plan().use.limited();
      });
      return bytes;
    };
    const Tier tier = in_files ? Tier::kNvme : Tier::kHost;
    const std::int64_t without = limited(tier, Tier::kMemory), least = limited(tier, tier);
    ASSERT_LT(least, without);
    strategy.memory.limit_bytes = (without + least) / 2;
    EXPECT_LE(limited(Tier::kAuto, Tier::kAuto), strategy.memory.limit_bytes);
    const Trained trained = train_on_threads(late({.ranks = 2}), strategy, options);
    expect_same_bits(trained, on_cpu, in_files ? "files" : "host");
    EXPECT_GT(trained.traffic.uploaded_bytes, 0);
    EXPECT_EQ(trained.traffic.disk_bytes_written > 0, in_files);
  }
}

/// The disk fails in set-up, in a gather, and when a record that the GPU changed is written.
TEST(DeviceParameters, FailedDiskEndsAllRanksAndNamesTheParameter) {
  const EmulatedGpus gpus;
  for (const std::int64_t nth : {2, 30, 75, 120, 200}) {
    const ScopedFaults faults({{.site = FaultSite::kCqe, .nth = nth, .action = FaultAction::kErrno, .number = EIO}});
    try {
      run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
        trained(mesh, below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1), kFilesAlone), 8, kWide);
      });
      FAIL() << nth << ": no error";
    } catch (const std::exception& error) {  // a c10::Error if an operator needed the unit
      const auto names_it = ::testing::AnyOf(HasSubstr("(parameter "), HasSubstr("(padding of unit "));
      EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("rank "), HasSubstr("Input/output error"), names_it)) << nth;
    }
  }
}

TEST(DeviceParameters, UnsupportedCombinationsAreRefusedByName) {
  const auto refusal_of = [](const Lying& lying, const Adjust& adjust) {
    return error_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Strategy strategy = below(strategy_of(kKept[2], ShardingStrategy::kFullShard), lying);
        adjust(strategy);
        const Session session(mesh, strategy);
      });
    });
  };
  EXPECT_THAT(refusal_of(kHostAlone, [](Strategy&) {}), HasSubstr("/offload/parameters/tier: \"host\" is for a GPU's"));
  EXPECT_THAT(refusal_of(kFilesAlone, [](Strategy& s) { s.offload.step = OffloadedStep::kGpu; }),
              HasSubstr("/offload/step: says who updates a GPU's masters"));
  const EmulatedGpus gpus;
  EXPECT_THAT(refusal_of(kFilesOverHost, [](Strategy& s) { s.offload.step = OffloadedStep::kCpu; }),
              HasSubstr("here they lie in files. [T0228] hint: give parameters the tier \"host\""));
  EXPECT_THAT(refusal_of(kHostAlone, [](Strategy& s) { s.strategy = ShardingStrategy::kNoShard; }),
              HasSubstr("keeps all parameters gathered"));
  Strategy open = below(strategy_of(kKept[2], ShardingStrategy::kFullShard), kFilesOverHost);
  open.offload.step = OffloadedStep::kAuto;
  EXPECT_THAT(stderr_of([&] { run_ranks({.ranks = 1}, [&](const Mesh& mesh) { const Session session(mesh, open); }); }),
              HasSubstr("are updated by the GPU, since parameters lie in files"));
}

}  // namespace device_parameters_test
}  // namespace tessera::testing
