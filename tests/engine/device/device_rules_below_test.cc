// Tests three kinds of rules on an emulated GPU whose state is offloaded to its host's memory and to disk. They are
// rules that read state twice, rules of whole tensors, and a program's own rules. Training gives the same bits as
// training on the CPU with all state in memory. Memory and traffic are as planned. Calls before and after a step find
// the state on its tier.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "lying.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/durable.h"
#include "tessera/error.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/own_adamw.h"
#include "tests/support/stand_ins/own_muon.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_rules_below_test {

using ::testing::HasSubstr;

struct Rule {
  const char* name;
  OptimizerConfig config;
  bool is_own() const { return config.type == OptimizerType::kOwn; }
  /// Returns whether the rule updates whole tensors. Such a rule has fp32 states.
  bool is_of_tensors() const {
    return config.type == OptimizerType::kAdafactor || config.type == OptimizerType::kOwnMatrix;
  }
};
const Rule kMuon{"muon", {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule kLamb{"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule kLars{
    "lars", {.type = OptimizerType::kLars, .lr = 0.5, .weight_decay = 0.1, .momentum = 0.9, .trust_coefficient = 0.02}};
const Rule kOwn{"own", {.type = OptimizerType::kOwn, .lr = 1e-2, .weight_decay = 0.1}};
const Rule kAdafactor{"adafactor", {.type = OptimizerType::kAdafactor, .lr = 1e-2, .weight_decay = 0.1}};
const Rule kOwnMatrix{"own_matrix", {.type = OptimizerType::kOwnMatrix, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule* const kRules[] = {&kMuon, &kLamb, &kLars, &kOwn, &kAdafactor, &kOwnMatrix};

/// Gives the strategy the rule, with vectors in a separate group.
Strategy with_rule(Strategy strategy, const Rule& rule) {
  const bool is_f32 = rule.is_own() || rule.is_of_tensors();
  const StateDType states = is_f32 ? StateDType::kF32 : strategy.optimizer.state_dtype;
  strategy.optimizer = rule.config;
  strategy.optimizer.state_dtype = states;
  strategy.optimizer.groups = {{.name = "vectors", .max_dim = 1, .weight_decay = 0.0}};
  return strategy;
}

OwnRules rules_of(const Rule& rule) {
  if (rule.config.type == OptimizerType::kOwnMatrix) return OwnRules::of(std::make_shared<OwnMuon>());
  return rule.is_own() ? OwnRules::of(std::make_shared<OwnAdamW>()) : OwnRules();
}

TrainOptions run_of(const TinyOptions& model, const Rule& rule) {
  TrainOptions options = run_of(model);
  options.own_rules = rules_of(rule);
  return options;
}

/// Returns all combinations of tiers: those with only a rule's state offloaded, and those with parameters offloaded
/// too.
std::vector<Lying> all_lying() {
  constexpr Lying kStatesOnHost{kInDevice, {Tier::kHost, 1}}, kSomeOnHost{kInDevice, {Tier::kHost, 0.4}, 8192, 2},
      kStatesInFiles{kInDevice, {Tier::kNvme, 1}}, kSomeInFiles{kInDevice, {Tier::kNvme, 0.6}, 4096, 2, 8192},
      kStatesByCpu{kInDevice, {Tier::kHost, 1}, 4096, 1, 0, OffloadedStep::kCpu};
  std::vector<Lying> all = {kStatesOnHost, kSomeOnHost, kStatesInFiles, kSomeInFiles, kStatesByCpu};
  all.insert(all.end(), std::begin(kLying), std::end(kLying));
  return all;
}

bool may_lie(const Rule& rule, ShardingStrategy kind, const Lying& lying) {
  const bool has_parameters = lying.parameters.tier != Tier::kMemory;
  return (!has_parameters || kind == ShardingStrategy::kFullShard) && (!lying.is_by_cpu() || rule.is_own());
}

void expect_the_cpus_bits(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options,
                          const Lying& lying, CopiesRead read, const Trained& on_cpu, const std::string& which) {
  const EmulatedGpus gpus(read);
  const Trained trained = train_on_threads(late(ranks), below(strategy, lying), options);
  expect_same_bits(trained, on_cpu, which);
  for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << which;
  EXPECT_EQ(trained.traffic.disk_bytes_written > 0, lying.is_in_files()) << which;
}

class DeviceRulesBelow : public ::testing::TestWithParam<const Rule*> {};
INSTANTIATE_TEST_SUITE_P(Each, DeviceRulesBelow, ::testing::ValuesIn(kRules),
                         [](const auto& info) { return std::string(info.param->name); });

/// A number of ranks, the model that they train, and the moment at which an emulated copy reads its source.
struct Way {
  const char* name;
  int ranks;
  TinyOptions model;
  CopiesRead read;
};
const Way kWays[] = {{"alone", 1, kWide, CopiesRead::kLate},
                     {"awkward", 2, kAwkward, CopiesRead::kLate},
                     {"awkward, read at once", 2, kAwkward, CopiesRead::kAtOnce},
                     {"on 3 ranks", 3, kWide, CopiesRead::kLate}};  // this case runs only in long tests

TEST_P(DeviceRulesBelow, TrainingGivesTheCpusBits) {
  MadeOnce<Trained> on_cpu;
  const auto exists = [](const Rule* rule, const Kept&, const Way&, const Lying& lying) {
    return may_lie(*rule, ShardingStrategy::kFullShard, lying);
  };
  for (const auto& [rule, kept, way, lying] :
       pairwise_where(exists, kRules, sampled_kept(), sampled(kWays, 3), all_lying())) {
    if (rule != GetParam()) continue;
    Strategy strategy = with_rule(strategy_of(kept, ShardingStrategy::kFullShard), *rule);
    strategy.mixed_precision.loss_scale.initial = 16777216.0;  // with this scale, fp16 skips the first steps
    strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
    const ThreadRanks ranks{.ranks = way.ranks};
    const TrainOptions options = run_of(way.model, *rule);
    const std::string what = std::string(rule->name) + ", " + tessera::testing::name_of(kept);
    const Trained& wanted =
        on_cpu(what + " on " + std::to_string(way.ranks), [&] { return train_on_threads(ranks, strategy, options); });
    expect_the_cpus_bits(ranks, strategy, options, lying, way.read, wanted,
                         what + " " + way.name + ", " + name_of(lying));
  }
}

/// A strategy and its mesh.
struct Where {
  Placed placed;
  bool over_world = false;
  bool is_hybrid() const { return placed.kind == ShardingStrategy::kHybridShard; }
  ThreadRanks ranks() const { return is_hybrid() ? ThreadRanks{.ranks = 4, .hosts = 2} : ThreadRanks{.ranks = 2}; }
};

TEST_P(DeviceRulesBelow, EveryStrategyGivesTheCpusBits) {
  std::vector<Where> all = {{ShardingStrategy::kHybridShard}, {ShardingStrategy::kHybridShard, true}};
  for (const Placed& placed : kStrategies) all.push_back({placed});
  MadeOnce<Trained> on_cpu;
  const auto exists = [](const Rule* rule, const Where& where, const Lying& lying) {
    return may_lie(*rule, where.placed.kind, lying);
  };
  // Each rule is trained with each combination of tiers.
  for (const auto& [rule, where, lying] : pairwise_where<2>(exists, kRules, all, all_lying())) {
    if (rule != GetParam()) continue;
    const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
    Strategy strategy = with_rule(strategy_of(kept, where.placed), *rule);
    strategy.optimizer.shard_over_world = where.over_world;
    if (!where.is_hybrid()) {
      strategy.ema.decay = 0.75;
      strategy.gradient_accumulation = 2;
    }
    const ThreadRanks ranks = where.ranks();
    const TrainOptions options = run_of(kWide, *rule);
    const std::string what = std::string(rule->name) + ", " + tessera::testing::name_of(where.placed) +
                             (where.over_world ? " over the world" : "");
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads(ranks, strategy, options); });
    expect_the_cpus_bits(ranks, strategy, options, lying, CopiesRead::kLate, wanted, what + ", " + name_of(lying));
  }
}

/// Two passes move as many bytes as the plan says. They move as many bytes to and from the disk as on the CPU. Records
/// that are still in slots when one pass ends and the next pass begins are not moved again.
TEST_P(DeviceRulesBelow, MemoryAndTrafficEqualThePlan) {
  const EmulatedGpus gpus;
  const auto exists = [](const Lying& lying, const Kept&, const Rule* rule) {
    return may_lie(*rule, ShardingStrategy::kFullShard, lying);
  };
  for (const auto& each : pairwise_where<2>(exists, all_lying(), kOneOfEachKind, kRules)) {
    const Lying& lying = std::get<0>(each);
    const Kept& kept = std::get<1>(each);
    const Rule& rule = *std::get<2>(each);
    if (&rule != GetParam()) continue;
    const std::string what = std::string(rule.name) + ", " + tessera::testing::name_of(kept) + ", " + name_of(lying);
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = below(with_rule(strategy_of(kept, ShardingStrategy::kFullShard), rule), lying);
      Session session(mesh, strategy, kWide, rules_of(rule));
      EXPECT_EQ(session.engine.plan().use, session.engine.allocated()) << what;
      expect_planned_traffic(session, lying, what);
    });
  }
}

TEST_P(DeviceRulesBelow, CallsAroundStepsGiveTheCpusBits) {
  const TestFolder folder;
  int run = 0;
  MadeOnce<Told> on_cpu;
  const auto exists = [](ShardingStrategy kind, const Lying& lying, const Rule* rule, DType) {
    return may_lie(*rule, kind, lying);
  };
  constexpr DType kDTypes[] = {DType::kBF16, DType::kF16};
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kShardGradients, ShardingStrategy::kFullShard};
  for (const auto& [kind, lying, rule, dtype] : pairwise_where<2>(exists, kKinds, all_lying(), kRules, kDTypes)) {
    if (rule != GetParam()) continue;
    Strategy strategy = with_rule(scheduled(kind, dtype), *rule);
    strategy.ema.decay = 0.75;
    const OwnRules own_rules = rules_of(*rule);
    const auto told = [&](const ThreadRanks& ranks, const Strategy& own) {
      const std::string path = (folder / std::to_string(run++)).string();
      return told_on(ranks, [&](const Mesh& mesh) { return led_through_everything(mesh, own, path, own_rules); });
    };
    const std::string what =
        std::string(rule->name) + ", " + std::string(tessera::name_of(dtype)) + ", " + tessera::name_of(kind);
    const Told& wanted = on_cpu(what, [&] { return told({.ranks = 2}, strategy); });
    const EmulatedGpus gpus;
    expect_same(told(late({.ranks = 2}), below(strategy, lying)), wanted, what + ", " + name_of(lying));
  }
}

TEST_P(DeviceRulesBelow, RunResumesFromItsLastCommit) {
  const Rule& rule = *GetParam();
  const Strategy plain = with_rule(strategy_of(kKept[2], ShardingStrategy::kFullShard), rule);
  for (const Lying& lying : {kHostAll, kFilesAll}) {
    const TestFolder folder;
    const EmulatedGpus gpus;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Strategy strategy = below(plain, lying);
      Values wanted;
      {
        Session whole(mesh, strategy, kWide, rules_of(rule));
        train(whole, 0, 6);
        wanted = whole.values();
      }
      strategy.durable = {.every = 2, .dir = folder.path().string()};
      {
        Session first(mesh, strategy, kWide, rules_of(rule));
        for (std::size_t i = 0; i < 5; ++i) {
          first.train(i);
          commit_durable(first.engine);
        }
      }
      Session second(mesh, strategy, kWide, rules_of(rule));
      ASSERT_TRUE(resume_durable(second.engine)) << rule.name;
      train(second, 4, 6);
      EXPECT_TRUE(all_same_bits(second.values(), wanted)) << rule.name << ", " << name_of(lying);
    });
  }
}

TEST(DeviceOwnBelow, OffloadedGradientsGiveTheCpusBits) {
  const Strategy strategy = with_rule(strategy_of(kKept[2], ShardingStrategy::kFullShard), kOwn);
  const TrainOptions options = run_of(kAwkward, kOwn);
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    for (const Lying& lying : {Lying{}, kHostAll, kByCpu, kFilesAll}) {
      Strategy on_gpu = below(strategy, lying);
      on_gpu.offload.gradients = tier;
      if (on_gpu.offload.uses_files()) on_gpu.offload.paths = {std::filesystem::temp_directory_path().string()};
      if (lying.parameters.tier == Tier::kMemory && lying.states.tier == Tier::kMemory)
        on_gpu.offload.record_bytes = OffloadConfig().record_bytes;
      const EmulatedGpus gpus;
      expect_same_bits(train_on_threads(late({.ranks = 2}), on_gpu, options), on_cpu, name_of(lying));
    }
  }
}

/// Returns the rule's strategy without clipping, since clipping is possible only with updates after backward.
Strategy without_clipping(const Kept& kept, const Rule& rule) {
  Strategy strategy = with_rule(strategy_of(kept, ShardingStrategy::kFullShard), rule);
  strategy.gradient_clipping = 0;
  return strategy;
}

TEST_P(DeviceRulesBelow, UpdatesInBackwardGiveTheCpusBits) {
  const std::pair<const char*, TinyOptions> models[] = {{"wide", kWide}, {"awkward", kAwkward}};
  const Lying all[] = {Lying{}, kHostMixed, kHostOverFiles, kFilesAll};
  MadeOnce<Trained> on_cpu;
  for (const auto& [rule, kept, model, read, lying] : pairwise_of(
           kRules, std::array{kKept[0], kKept[2]}, models, std::array{CopiesRead::kLate, CopiesRead::kAtOnce}, all)) {
    if (rule != GetParam()) continue;
    Strategy strategy = without_clipping(kept, *rule);
    strategy.ema.decay = 0.75;
    const TrainOptions options = run_of(model.second, *rule);
    const std::string what = tessera::testing::name_of(kept) + ", " + model.first;
    const Trained& wanted = on_cpu(what, [&] { return train_on_threads({.ranks = 2}, strategy, options); });
    strategy.optimizer.in_backward = true;
    const EmulatedGpus gpus(read);
    const Strategy on_gpu = lying.states.tier == Tier::kMemory ? strategy : below(strategy, lying);
    const Trained trained = train_on_threads(late({.ranks = 2}), on_gpu, options);
    expect_same_bits(trained, wanted, what + ", " + name_of(lying));
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << what << ", " << name_of(lying);
  }
}

/// Each unit's passes move the bytes that the plan says, during the backward of the next unit.
TEST_P(DeviceRulesBelow, MemoryAndTrafficInBackwardEqualThePlan) {
  const EmulatedGpus gpus;
  for (const Lying& lying : {kHostMixed, kFilesAll}) {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Strategy strategy = below(without_clipping(kKept[2], *GetParam()), lying);
      strategy.optimizer.in_backward = true;
      Session session(mesh, strategy, kWide, rules_of(*GetParam()));
      if (lying.is_in_files()) expect_planned_disk_traffic(session, name_of(lying));
      session.train(0);
      const PlannedMemory plan = session.engine.plan();
      const TrafficCounts before = session.engine.traffic();
      session.train(1).wait();
      const TrafficCounts after = session.engine.traffic();
      EXPECT_EQ(after.streamed_bytes - before.streamed_bytes, plan.streamed_bytes) << name_of(lying);
      EXPECT_EQ(plan.use, session.engine.allocated()) << name_of(lying);
    });
  }
}

/// Records are being copied to the GPU when the rule throws, and none has been copied back yet.
TEST(DeviceMatricesBelow, FirstStepThrowsTheRulesOwnException) {
  struct Throws final : MatrixOptimizer {
    std::vector<State> states(std::int64_t rows, std::int64_t columns) const override {
      return {{"sum", {rows, columns}}};
    }
    void update(Matrix&) const override { TORCH_CHECK(false, "a rule with a toothache"); }
  };
  for (const Lying& lying : {kHostAll, kFilesAll, kHostOverFiles}) {
    const EmulatedGpus gpus;
    run_ranks(late({.ranks = 1}), [&](const Mesh& mesh) {
      const Strategy strategy =
          below(with_rule(strategy_of(kKept[2], ShardingStrategy::kFullShard), kOwnMatrix), lying);
      Session session(mesh, strategy, kWide, OwnRules::of(std::make_shared<Throws>()));
      EXPECT_THAT(error_of([&] { session.train(0).wait(); }), HasSubstr("a rule with a toothache")) << name_of(lying);
    });
  }
}

std::string error_of_engine(const Strategy& strategy) {
  const EmulatedGpus gpus;
  return error_of([&] { run_ranks(late({.ranks = 1}), [&](const Mesh& mesh) { Session(mesh, strategy, kWide); }); });
}

/// Weights in records are copied if their norms are needed. A record that has only moments needs no copy.
TEST(DeviceRulesOnTheHost, OnlyOffloadedWeightsAreCopiedForTheirNorms) {
  const auto scratch = [](const Kept& kept, const Lying& lying) {
    std::int64_t bytes = 0;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = below(with_rule(strategy_of(kept, ShardingStrategy::kFullShard), kLamb), lying);
      const Session session(mesh, strategy, kWide);
      if (mesh.rank() == 0) bytes = session.engine.plan().use[MemoryCategory::kStaging];
    });
    return bytes;
  };
  const EmulatedGpus gpus;
  const Lying states{kInDevice, {Tier::kHost, 1}};
  EXPECT_EQ(scratch(kKept[0], states), 0) << "fp32 parameters are the masters";
  const std::int64_t head = std::int64_t{kWide.vocab} * kWide.width;
  EXPECT_GE(scratch(kKept[2], states), head / 2 * 4) << "of split masters";
  EXPECT_GE(scratch(kKept[0], kHostAlone), head / 2 * 4) << "of parameters on the host";
}

/// The host learns of the nonfinite gradient at the unit that has it, and calls no rule after that.
TEST(DeviceOwnBelow, NonFiniteGradientInBackwardEndsTheRunAndNamesTheUnit) {
  for (const Lying& lying : {Lying{}, kHostAll, kFilesAll}) {
    const EmulatedGpus gpus;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Strategy strategy = with_rule(strategy_of(kKept[2], ShardingStrategy::kFullShard), kOwn);
      strategy.gradient_clipping = 0;
      strategy.optimizer.in_backward = true;
      if (lying.states.tier != Tier::kMemory) strategy = below(strategy, lying);
      Session session(mesh, strategy, kWide, rules_of(kOwn));
      session.train(0);
      session.engine.backward(session.loss(1) * std::numeric_limits<double>::infinity());
      StepResult step = session.engine.step();
      EXPECT_THAT(error_of([&] { step.wait(); }), HasSubstr("the gradient of unit ")) << name_of(lying);
    });
  }
}

TEST(DeviceRulesOnTheHost, CpuUpdatesAreRefusedForRulesOfSeveralPasses) {
  for (const Kept& kept : {kKept[0], kKept[2]}) {  // with fp32 parameters, adafactor has no state of elements
    for (const Rule* rule : {&kMuon, &kLamb, &kLars, &kAdafactor}) {
      const Strategy strategy = below(with_rule(strategy_of(kept, ShardingStrategy::kFullShard), *rule), kByCpu);
      EXPECT_THAT(error_of_engine(strategy),
                  HasSubstr("/offload/step: \"cpu\" updates each element once its gradient"));
    }
  }
}

TEST(DeviceRulesOnTheHost, AutoChoosesTheGpuForRulesOfSeveralPasses) {
  const EmulatedGpus gpus;
  for (const Rule* rule : kRules) {
    const std::string said = stderr_of([&] {
      run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
        Strategy strategy = below(with_rule(strategy_of(kKept[2], ShardingStrategy::kFullShard), *rule), kHostAll);
        strategy.offload.step = OffloadedStep::kAuto;
        Session session(mesh, strategy, kWide, rules_of(*rule));
        session.train(0).wait();
        EXPECT_GT(session.engine.traffic().streamed_bytes, 0);
      });
    });
    const bool adapts_layers = rule == &kLamb || rule == &kLars;
    const std::string why =
        std::string(rule->name) + (adapts_layers ? " goes over them twice" : " looks at whole matrices");
    EXPECT_THAT(said,
                HasSubstr(rule->is_own() ? "the GPU, which computes a program's rule there" : "the GPU, as " + why));
  }
}

}  // namespace device_rules_below_test
}  // namespace tessera::testing
