// Tests offloading the sums of a GPU's gradients to its host's memory and to disk, on an emulated GPU. Training has the
// bits of the CPU with all state in memory, on whichever tiers the rest of the state lies. Memory and traffic are as
// planned.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "offload/files/fault_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_gradients_test {

using ::testing::HasSubstr;

/// The tiers on which gradients lie, on which masters and states lie, and on which parameters lie.
struct Lying {
  const char* name;
  Tier gradients;
  OffloadedState states = {}, parameters = {};
  OffloadedStep step = OffloadedStep::kGpu;
  bool is_in_files() const {
    return gradients == Tier::kNvme || states.tier == Tier::kNvme || parameters.tier == Tier::kNvme;
  }
};
constexpr Lying kLying[] = {
    {"host", Tier::kHost},
    {"files", Tier::kNvme},
    {"host, states there", Tier::kHost, {Tier::kHost, 0.5}},
    {"host, by the CPU", Tier::kHost, {Tier::kHost, 1}, {}, OffloadedStep::kCpu},
    {"files, half by the CPU", Tier::kNvme, {Tier::kHost, 0.5}, {}, OffloadedStep::kCpu},
    {"files, all", Tier::kNvme, {Tier::kNvme, 1}, {Tier::kNvme, 1}},
    {"host, all by the CPU", Tier::kHost, {Tier::kHost, 1}, {Tier::kHost, 1}, OffloadedStep::kCpu},
    {"host, parameters in files", Tier::kHost, {}, {Tier::kNvme, 0.5}}};

Strategy below(Strategy strategy, const Lying& lying) {
  OffloadConfig& offload = strategy.offload;
  offload.gradients = lying.gradients;
  const auto kind = strategy.strategy;
  if (kind == ShardingStrategy::kFullShard || kind == ShardingStrategy::kHybridShard)
    offload.parameters = lying.parameters;
  offload.moments = lying.states;
  if (strategy.mixed_precision.param != DType::kF32) offload.masters = lying.states;
  if (offload.parameters.tier != Tier::kMemory || lying.states.tier != Tier::kMemory) offload.record_bytes = 4096;
  if (lying.states.tier == Tier::kHost) offload.step = lying.step;
  if (offload.uses_files()) offload.paths = {std::filesystem::temp_directory_path().string()};
  return strategy;
}

TrainOptions run_of_four_blocks(const TinyOptions& model) {
  TrainOptions options = short_run();
  options.model = model;
  options.model.blocks = 4;
  options.steps = 6;
  return options;
}

void expect_the_bits_of(const Trained& on_cpu, const ThreadRanks& ranks, const Strategy& strategy, const Lying& lying,
                        CopiesRead read, const TrainOptions& options, const std::string& what) {
  const std::string which = what + ", " + lying.name;
  const EmulatedGpus gpus(read);
  const Trained trained = train_on_threads(late(ranks), below(strategy, lying), options);
  expect_same_bits(trained, on_cpu, which);
  EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << which;
  EXPECT_GT(trained.traffic.gradients.to_host, 0) << which;
  EXPECT_EQ(trained.traffic.disk_bytes_written > 0, below(strategy, lying).offload.uses_files()) << which;
}

constexpr CopiesRead kReads[] = {CopiesRead::kLate, CopiesRead::kAtOnce};

TEST(DeviceGradients, TrainingGivesTheCpusBits) {
  const std::pair<int, std::int64_t> kRuns[] = {{1, 3}, {2, 1}, {1, 1}, {2, 3}, {3, 1}};  // ranks and microbatches
  MadeOnce<Trained> on_cpu;
  for (const auto& [kept, kind, run, lying, read] : pairwise_of(kOneOfEachKind, kThree, kRuns, kLying, kReads)) {
    Strategy strategy = strategy_of(kept, kind);
    strategy.gradient_accumulation = run.second;
    strategy.mixed_precision.loss_scale.initial = 16777216.0;  // with this scale, fp16 skips the first steps
    strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
    const ThreadRanks ranks{.ranks = run.first};
    const TrainOptions options = run_of_four_blocks(kWide);
    const std::string what = tessera::testing::name_of(kept) + ", " + tessera::name_of(kind) + " on " +
                             std::to_string(run.first) + " ranks, " + std::to_string(run.second) + " microbatches";
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads(ranks, strategy, options); });
    expect_the_bits_of(wanted, ranks, strategy, lying, read, options, what);
  }
}

TEST(DeviceGradients, ReplicasGiveTheCpusBits) {
  const Strategy strategy = strategy_of(kKept[3], ShardingStrategy::kHybridShard);
  const ThreadRanks ranks{.ranks = 4, .hosts = 2};
  const TrainOptions options = run_of_four_blocks(kWide);
  const Trained on_cpu = train_on_threads(ranks, strategy, options);
  for (const auto& [lying, read] : pairwise_of<1>(kLying, kReads))
    expect_the_bits_of(on_cpu, ranks, strategy, lying, read, options, "hybrid");
}

/// The modules have gradients that arrive late, tied and unused parameters, and frozen units.
TEST(DeviceGradients, TiedUnusedAndFrozenParametersGiveTheCpusBits) {
  TrainOptions shared = run_of_four_blocks(kWide);
  shared.model.recompute = shared.model.shared_block = true;
  const std::pair<std::string, TrainOptions> runs[] = {{"awkward", run_of_four_blocks(kAwkward)},
                                                       {"shared and recomputed", shared}};
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kShardGradients, ShardingStrategy::kFullShard};
  MadeOnce<Trained> on_cpu;
  for (const auto& [run, kind, lying] : pairwise_of(runs, kKinds, kLying)) {
    Strategy strategy = strategy_of(kKept[2], kind);
    strategy.gradient_accumulation = 2;
    const TrainOptions& options = run.second;
    const std::string what = run.first + ", " + tessera::name_of(kind);
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads({.ranks = 2}, strategy, options); });
    const EmulatedGpus gpus;
    expect_same_bits(train_on_threads(late({.ranks = 2}), below(strategy, lying), options), wanted,
                     what + ", " + lying.name);
  }
}

TEST(DeviceGradients, EveryTransportAveragesAndActivationsGiveTheCpusBits) {
  Strategy strategy = strategy_of(kKept[2], ShardingStrategy::kFullShard);
  strategy.ema.decay = 0.75;
  const auto body = [&](const Strategy& own) {
    return [&](const Mesh& mesh) {
      Session session(mesh, own, kWide);
      std::vector<StepResult> steps = train(session, 0, 3);
      { const Gathered looks(session.engine, Gathered::kEma); }
      for (StepResult& step : train(session, 3, 6)) steps.push_back(step);
      return told_by(session, std::move(steps));
    };
  };
  const Told wanted = told_on({.ranks = 2}, body(strategy));
  for (const Lying& lying : kLying) {
    Strategy own = below(strategy, lying);
    own.offload.activations = Tier::kHost;
    own.offload.activations_min_bytes = 1;
    on_gpus_in_turn(2, [&](const ThreadRanks& joined, const std::string& what) {
      expect_same(told_on(joined, body(own)), wanted, what + ", " + lying.name);
    });
  }
}

/// One program drops gradients and makes two backwards of one forward. The other program freezes weights for a while.
TEST(DeviceGradients, CallsAroundAStepGiveTheCpusBits) {
  const auto drops_and_repeats = [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy, kWide);
    session.train(0);
    session.engine.backward(session.loss(7));
    session.engine.zero_grad();
    session.train(1);
    for (std::size_t i = 2; i < 4; ++i) {
      const at::Tensor loss = session.loss(i);
      session.engine.backward(loss, {.retain_graph = true});
      session.engine.backward(loss * 0.5);
      session.engine.backward(session.loss(i + 1));
      session.engine.step();
    }
    return session.values();
  };
  const auto frozen = [](const Mesh& mesh, const Strategy& given) {
    Strategy strategy = given;
    strategy.gradient_accumulation = 1;
    return trained_with_weights_frozen_for_a_while(mesh, strategy);
  };
  using Body = std::function<Values(const Mesh&, const Strategy&)>;
  for (const Body& body : {Body(drops_and_repeats), Body(frozen)}) {
    Strategy strategy = strategy_of(kKept[2], ShardingStrategy::kFullShard);
    strategy.gradient_accumulation = 2;
    const auto run = [&](const ThreadRanks& ranks, const Strategy& own) {
      return told_on(ranks, [&](const Mesh& mesh) { return Told{{}, body(mesh, own), {}}; });
    };
    const Told wanted = run({.ranks = 2}, strategy);
    const EmulatedGpus gpus;
    for (const Lying& lying : kLying) expect_same(run(late({.ranks = 2}), below(strategy, lying)), wanted, lying.name);
  }
}

TEST(DeviceGradients, MemoryAndTrafficEqualThePlan) {
  const EmulatedGpus gpus;
  constexpr std::int64_t kAccumulations[] = {1, 3};
  for (const auto& each : pairwise_of(kAccumulations, kLying, std::array{1, 2})) {
    const std::int64_t accumulation = std::get<0>(each);
    const Lying& lying = std::get<1>(each);
    const int ranks = std::get<2>(each);
    const std::string what = std::string(lying.name) + ", " + std::to_string(accumulation) + " microbatches";
    run_ranks(late({.ranks = ranks}), [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(kKept[2], ShardingStrategy::kFullShard);
      strategy.gradient_accumulation = accumulation;
      const TinyOptions model{.vocab = 32, .width = 32, .hidden = 64, .blocks = 7};
      Session session(mesh, below(strategy, lying), model);
      const PlannedMemory plan = session.engine.plan();
      EXPECT_EQ(plan.use, session.engine.allocated()) << what;
      EXPECT_THAT(plan.table, HasSubstr("gradients: a step copies ")) << what;
      if (lying.is_in_files()) expect_planned_disk_traffic(session, what);
      if (!lying.is_in_files()) session.train(0);
      for (std::size_t i = 0; i < 3; ++i) {
        const TrafficCounts before = session.engine.traffic();
        session.train(i);
        const TrafficCounts after = session.engine.traffic();
        EXPECT_EQ(after.gradients.to_host - before.gradients.to_host, plan.gradients.to_host) << what;
        EXPECT_EQ(after.gradients.to_gpu - before.gradients.to_gpu, plan.gradients.to_gpu) << what;
        EXPECT_EQ(after.host_step.to_host - before.host_step.to_host, plan.host_step.to_host) << what;
        EXPECT_EQ(after.host_step.to_gpu - before.host_step.to_gpu, plan.host_step.to_gpu) << what;
      }
      EXPECT_EQ(plan.use, session.engine.allocated()) << what;
    });
  }
}

TEST(DeviceGradients, FailedDiskEndsAllRanksAndNamesTheUnit) {
  const EmulatedGpus gpus;
  for (const std::int64_t nth : {2, 9, 30}) {
    const ScopedFaults faults({{.site = FaultSite::kCqe, .nth = nth, .action = FaultAction::kErrno, .number = EIO}});
    try {
      run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
        TinyOptions model = kWide;
        model.blocks = 7;
        trained(mesh, below(strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1), kLying[1]), 8, model);
      });
      FAIL() << nth << ": no error";
    } catch (const std::exception& error) {
      // A rank that learns of the failure inside an operator gets a c10::Error with the same text and without an exit
      // code.
      const auto* const ours = dynamic_cast<const Error*>(&error);
      EXPECT_TRUE(ours == nullptr || ours->exit_code() == ExitCode::kIo) << error.what();
      EXPECT_THAT(std::string(error.what()), ::testing::AllOf(HasSubstr("rank "), HasSubstr("Input/output error"),
                                                              HasSubstr("gradients of unit ")))
          << nth;
    }
  }
}

TEST(DeviceGradients, HostTierForGradientsIsRefusedOnTheCpu) {
  EXPECT_THAT(error_of([] {
                run_ranks({.ranks = 1}, [](const Mesh& mesh) {
                  const Session session(mesh, below(strategy_of(kKept[2], ShardingStrategy::kFullShard), kLying[0]));
                });
              }),
              HasSubstr("/offload/gradients/tier: \"host\" is for a GPU's gradients"));
}

}  // namespace device_gradients_test
}  // namespace tessera::testing
