// Tests "optimizer.in_backward" on an emulated GPU. Training gives the same bits as training on the CPU with updates
// after backward, however late the device is, and on whichever tiers masters, states and parameters lie. Calls that are
// impossible with updates in backward give an error.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/durable.h"
#include "tessera/error.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/own_muon.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_in_backward_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

Strategy after_backward(const Placed& placed, DType dtype) {
  Strategy strategy = strategy_of(placed, dtype, 1);
  strategy.gradient_clipping = 0;
  return strategy;
}

Strategy in_backward(Strategy strategy) {
  strategy.optimizer.in_backward = true;
  return strategy;
}

/// Compares the CPU, which updates after backward, with GPUs, which update during backward. `below` says where a GPU's
/// state lies.
void expect_the_cpus_bits(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options,
                          const std::string& what, const Adjust& below = nullptr) {
  const Trained on_cpu = train_on_threads(ranks, strategy, options);
  Strategy on_gpu = in_backward(strategy);
  if (below) below(on_gpu);
  expect_same_on_gpus(ranks, on_cpu, on_gpu, options, what);
  if (!below) return;
  const EmulatedGpus gpus(CopiesRead::kAtOnce);
  const Trained trained = train_on_threads(late(ranks), on_gpu, options);
  expect_same_bits(trained, on_cpu, what + ", copies read at once");
  EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << what;
}

TrainOptions short_run_of(const TinyOptions& model) {
  TrainOptions options = short_run();
  options.model = model;
  return options;
}

struct Case {
  DType dtype;
  int ranks;
};

class DeviceInBackward : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceInBackward, GivesTheCpusBitsUnderEveryStrategy) {
  const auto [dtype, ranks] = GetParam();
  for (const Placed& placed : kStrategies) {
    for (const TinyOptions& model : {TinyOptions{}, kOfEveryKind}) {
      const std::string what = name_of(placed) + (model.unused_block ? ", awkward" : "");
      expect_the_cpus_bits({.ranks = ranks}, after_backward(placed, dtype), short_run_of(model), what);
    }
  }
  if (ranks < 4) return;
  for (const bool world : {false, true}) {
    Strategy hybrid = after_backward(ShardingStrategy::kHybridShard, dtype);
    hybrid.optimizer.shard_over_world = world;
    expect_the_cpus_bits({.ranks = 4, .hosts = 2}, hybrid, short_run(), world ? "hybrid over the world" : "hybrid");
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceInBackward,
                         ::testing::Values(Case{DType::kF32, 1}, Case{DType::kBF16, 1}, Case{DType::kBF16, 2},
                                           Case{DType::kF32, 3}, Case{DType::kBF16, 4}),
                         [](const auto& info) {
                           return std::string(name_of(info.param.dtype)) + "_ranks" + std::to_string(info.param.ranks);
                         });

/// Each group has several records. One record or a few of them are under way at once.
TEST(DeviceInBackward, OffloadedStateChangesNoBits) {
  struct Lying {
    const char* name;
    Tier parameters, states;
    double share;
    std::int64_t queue_depth;
  };
  using enum Tier;
  constexpr Lying kLying[] = {{"states on the host", kMemory, kHost, 1, 1},
                              {"some states on the host", kMemory, kHost, 0.4, 3},
                              {"states in files", kMemory, kNvme, 1, 1},
                              {"some states in files", kMemory, kNvme, 0.6, 4},
                              {"parameters on the host", kHost, kMemory, 1, 1},
                              {"all on the host", kHost, kHost, 1, 2},
                              {"all in files", kNvme, kNvme, 1, 2}};
  for (const auto& each : pairwise_of(std::array{1, 2}, std::array{DType::kF32, DType::kBF16}, kLying)) {
    const DType dtype = std::get<1>(each);
    const Lying& lying = std::get<2>(each);
    const bool has_parameters = lying.parameters != kMemory;
    const Placed placed = has_parameters ? ShardingStrategy::kFullShard : ShardingStrategy::kShardGradients;
    expect_the_cpus_bits({.ranks = std::get<0>(each)}, after_backward(placed, dtype),
                         short_run_of({.width = 32, .hidden = 64, .blocks = 3}), lying.name, [&](Strategy& strategy) {
                           OffloadConfig& offload = strategy.offload;
                           offload.parameters.tier = lying.parameters;
                           offload.moments = {lying.states, lying.share};
                           if (dtype != DType::kF32) offload.masters = offload.moments;
                           offload.record_bytes = 4096;
                           offload.queue_depth = lying.queue_depth;
                           if (lying.states == kNvme) offload.paths = {std::filesystem::temp_directory_path().string()};
                         });
  }
}

TEST(DeviceInBackward, EveryStateFormatRuleAndAverageGivesTheCpusBits) {
  for (const StateDType states : {StateDType::kBF16, StateDType::k8Bit}) {
    Strategy strategy = after_backward(ShardingStrategy::kFullShard, DType::kBF16);
    strategy.optimizer.state_dtype = states;
    strategy.ema.decay = 0.75;
    strategy.gradient_clip_value = 1e-3;
    expect_the_cpus_bits({.ranks = 2}, strategy, short_run(), tessera::name_of(states));
  }
  for (const OptimizerType type : {OptimizerType::kLion, OptimizerType::kRmsprop}) {
    Strategy strategy = after_backward(ShardingStrategy::kShardOptimizer, DType::kF32);
    strategy.optimizer.type = type;
    expect_the_cpus_bits({.ranks = 2}, strategy, short_run(), tessera::name_of(type));
  }
}

TEST(DeviceInBackward, RatesThatFollowTheSamplesGiveTheCpusBits) {
  for (const int ranks : {1, 2}) {
    Strategy strategy = after_backward(ShardingStrategy::kFullShard, DType::kBF16);
    strategy.lr_schedule = {.base_batch_size = 5, .batch_scaling = BatchScaling::kSquareRoot, .warmup_samples = 40};
    expect_the_cpus_bits({.ranks = ranks}, strategy, short_run(), "samples");
  }
}

TEST(DeviceInBackward, CallsAroundStepsGiveTheCpusBits) {
  const TestFolder folder;
  int run = 0;
  for (const auto& [kind, by_hand, tier] :
       pairwise_of(kThree, std::array{false, true}, std::array{Tier::kMemory, Tier::kHost})) {
    Strategy strategy = scheduled(kind, DType::kBF16);
    strategy.gradient_clipping = 0;
    strategy.ema.decay = 0.75;
    if (by_hand) strategy.lr_schedule = {.type = LrScheduleType::kManual};
    strategy.optimizer.groups = {{.name = "vectors", .max_dim = 1, .weight_decay = 0.0},
                                 {.name = "head", .match = {"head*"}, .lr_ratio = 0.1, .eps = 1e-2}};
    const auto body = [&](const Strategy& on) {
      const std::string own = (folder / std::to_string(run++)).string();
      return [on, own](const Mesh& mesh) { return led_through_everything(mesh, on, own); };
    };
    const Told wanted = told_on({.ranks = 2}, body(strategy));
    Strategy on_gpu = in_backward(strategy);
    on_gpu.offload.moments.tier = on_gpu.offload.masters.tier = tier;
    on_gpu.offload.record_bytes = 4096;
    const std::string what = name_of(kind) + (by_hand ? ", by hand " : " ");
    on_gpus(2, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same(told_on(joined, body(on_gpu)), wanted, what + how);
    });
  }
}

TEST(DeviceInBackward, RunResumesFromItsLastCommit) {
  for (const Tier tier : {Tier::kMemory, Tier::kHost, Tier::kNvme}) {
    const TestFolder folder;
    const EmulatedGpus gpus;
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Strategy strategy = in_backward(after_backward(ShardingStrategy::kFullShard, DType::kBF16));
      OffloadConfig& offload = strategy.offload;
      offload.parameters.tier = offload.masters.tier = offload.moments.tier = tier;
      if (tier == Tier::kNvme) offload.paths = {std::filesystem::temp_directory_path().string()};
      Values wanted;
      {
        Session whole(mesh, strategy);
        train(whole, 0, 6);
        wanted = whole.values();
      }
      strategy.durable = {.every = 2, .dir = folder.path().string()};
      {
        Session first(mesh, strategy);
        for (std::size_t i = 0; i < 5; ++i) {
          first.train(i);
          commit_durable(first.engine);
        }
      }
      Session second(mesh, strategy);
      ASSERT_TRUE(resume_durable(second.engine));
      train(second, 4, 6);
      EXPECT_TRUE(all_same_bits(second.values(), wanted));
    });
  }
}

// ---- Rules that need more of a unit than its elements one by one: norms of its layers, or whole matrices ------------

struct Rule {
  const char* name;
  OptimizerConfig config;
  bool is_of_tensors() const {
    return config.type == OptimizerType::kAdafactor || config.type == OptimizerType::kOwnMatrix;
  }
  bool adapts() const { return config.type == OptimizerType::kLamb || config.type == OptimizerType::kLars; }
};
const Rule kLamb{"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule kLars{"lars",
                 {.type = OptimizerType::kLars,
                  .lr = 0.5,
                  .weight_decay = 0.1,
                  .momentum = 0.9,
                  .nesterov = true,
                  .trust_coefficient = 0.02}};
const Rule kMuon{"muon", {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule kAdafactor{"adafactor", {.type = OptimizerType::kAdafactor, .lr = 1e-2, .weight_decay = 0.1}};
const Rule kOwnMatrix{"own_matrix", {.type = OptimizerType::kOwnMatrix, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}};
const Rule* const kRules[] = {&kLamb, &kLars, &kMuon, &kAdafactor, &kOwnMatrix};

/// Gives the strategy the rule, with vectors that have no decay and whose rates do not depend on norms.
Strategy with_rule(Strategy strategy, const Rule& rule) {
  const StateDType states = strategy.optimizer.state_dtype;
  strategy.optimizer = rule.config;
  strategy.optimizer.state_dtype = states;
  strategy.optimizer.groups = {
      {.name = "vectors", .max_dim = 1, .weight_decay = 0.0, .layer_adaptation = !rule.adapts()},
      {.name = "downs", .match = {"blocks.*.down.weight"}, .lr_ratio = 0.3, .weight_decay = 0.3}};
  return strategy;
}

OwnRules rules_for(const Rule& rule) {
  return rule.config.type == OptimizerType::kOwnMatrix ? OwnRules::of(std::make_shared<OwnMuon>()) : OwnRules();
}

class DeviceRulesInBackward : public ::testing::TestWithParam<const Rule*> {};
INSTANTIATE_TEST_SUITE_P(Each, DeviceRulesInBackward, ::testing::ValuesIn(kRules),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(DeviceRulesInBackward, GiveTheCpusBits) {
  const auto exists = [](const Rule* rule, ShardingStrategy, int, DType, StateDType states, bool) {
    return states == StateDType::kF32 || !rule->is_of_tensors();
  };
  for (const auto& [rule, kind, ranks, dtype, states, is_awkward] :
       pairwise_where(exists, kRules, kThree, std::array{1, 2, 3}, std::array{DType::kF32, DType::kBF16},
                      std::array{StateDType::kF32, StateDType::k8Bit}, std::array{false, true})) {
    if (rule != GetParam()) continue;
    Strategy strategy = after_backward(kind, dtype);
    strategy.optimizer.state_dtype = states;
    strategy = with_rule(strategy, *rule);
    strategy.ema.decay = 0.75;
    TrainOptions options = short_run_of(is_awkward ? kOfEveryKind : kTwoBlocks);
    options.own_rules = rules_for(*rule);
    expect_the_cpus_bits({.ranks = ranks}, strategy, options,
                         std::string(rule->name) + ", " + tessera::name_of(kind) + " on " + std::to_string(ranks) +
                             (is_awkward ? " ranks, awkward" : " ranks"));
  }
}

TEST_P(DeviceRulesInBackward, GiveTheCpusBitsOnTwoAxes) {
  const Rule& rule = *GetParam();
  Strategy strategy = with_rule(after_backward(ShardingStrategy::kHybridShard, DType::kBF16), rule);
  strategy.optimizer.shard_over_world = !rule.adapts();
  TrainOptions options = short_run();
  options.own_rules = rules_for(rule);
  expect_the_cpus_bits({.ranks = 4, .hosts = 2}, strategy, options, rule.name);
}

TEST_P(DeviceRulesInBackward, CallsAroundStepsGiveTheCpusBits) {
  const TestFolder folder;
  int run = 0;
  const Rule& rule = *GetParam();
  Strategy strategy = with_rule(scheduled(ShardingStrategy::kFullShard, DType::kBF16), rule);
  strategy.gradient_clipping = 0;
  strategy.ema.decay = 0.75;
  if (rule.is_of_tensors() || rule.adapts()) strategy.lr_schedule = {.type = LrScheduleType::kManual};
  const auto body = [&](const Strategy& on) {
    const std::string own = (folder / std::to_string(run++)).string();
    return [&rule, on, own](const Mesh& mesh) { return led_through_everything(mesh, on, own, rules_for(rule)); };
  };
  const Told wanted = told_on({.ranks = 2}, body(strategy));
  on_gpus(2, [&](const ThreadRanks& joined, const std::string& how) {
    expect_same(told_on(joined, body(in_backward(strategy))), wanted, std::string(rule.name) + ", " + how);
  });
}

/// Ranks exchange the norms of layers once for each unit. A GPU measures the wait for each exchange.
TEST(DeviceRulesInBackward, ExchangeOfAUnitsNormsCountsAsExposed) {
  const EmulatedGpus gpus;
  double seconds[2] = {};
  for (const bool lamb : {false, true}) {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = in_backward(after_backward(ShardingStrategy::kFullShard, DType::kF32));
      Session session(mesh, lamb ? in_backward(with_rule(strategy, kLamb)) : strategy, {.blocks = 2});
      StepResult result = session.train(0);
      result.wait();
      // the emulated clock counts one second for each wait
      if (mesh.rank() == 0) seconds[lamb] = result.communication_seconds;
    });
  }
  EXPECT_EQ(seconds[1], seconds[0] + 3) << "two blocks and the root";
}

TEST_P(DeviceRulesInBackward, NonFiniteGradientEndsTheRunAndNamesTheUnit) {
  const EmulatedGpus gpus;
  const Strategy strategy = with_rule(after_backward(ShardingStrategy::kFullShard, DType::kF32), *GetParam());
  const std::string error = error_of([&] {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Session session(mesh, in_backward(strategy), {}, rules_for(*GetParam()));
      session.train(0);
      session.engine.backward(session.loss(1) * std::numeric_limits<double>::infinity());
      session.engine.step().wait();
    });
  });
  EXPECT_THAT(error,
              AllOf(HasSubstr("the gradient of unit "), HasSubstr("infinite or NaN"), HasSubstr("cannot be skipped")));
}

/// The rank whose part of the gradient is not finite ends the run before it sends that part to its owner, which may be
/// another rank.
TEST(DeviceRulesInBackward, RuleOfTheProgramGetsNoBadPartOfAnotherRank) {
  struct Watchful final : MatrixOptimizer {
    std::vector<State> states(std::int64_t, std::int64_t) const override { return {}; }
    void update(Matrix& m) const override {
      if (!m.gradient.isfinite().all().item<bool>()) got_bad_values = true;
      m.parameter.sub_(m.gradient, m.lr);
    }
    mutable std::atomic<bool> got_bad_values = false;
  };
  const EmulatedGpus gpus;
  const auto rule = std::make_shared<Watchful>();
  const std::string error = error_of([&] {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      const Strategy strategy = with_rule(after_backward(ShardingStrategy::kFullShard, DType::kF32), kOwnMatrix);
      Session session(mesh, in_backward(strategy), {}, OwnRules::of(rule));
      session.train(0);
      const bool spoils = mesh.rank() == 1;
      session.model->blocks->ptr<BlockImpl>(1)->up->weight.register_hook([spoils](const at::Tensor& gradient) {
        const at::Tensor spoilt = gradient.clone();
        if (spoils) spoilt.view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
        return spoilt;
      });
      session.train(1).wait();
    });
  });
  EXPECT_THAT(error, HasSubstr("the gradient of unit blocks.1 is infinite or NaN"));
  EXPECT_FALSE(rule->got_bad_values.load());
}

/// The device updates nothing from the first unit with a nonfinite gradient on. The host learns of that gradient when
/// it waits for the result.
TEST(DeviceInBackward, NonFiniteGradientEndsTheRunAndNamesTheUnit) {
  for (const Placed& placed : kStrategies) {
    for (const int ranks : {1, 2}) {
      const EmulatedGpus gpus;
      run_ranks(late({.ranks = ranks}), [&](const Mesh& mesh) {
        Session session(mesh, in_backward(after_backward(placed, DType::kF32)));
        session.train(0);
        session.engine.backward(session.loss(1) * std::numeric_limits<double>::infinity());
        StepResult step = session.engine.step();
        EXPECT_THAT(
            error_of(ExitCode::kCorruptData, [&] { step.wait(); }),
            AllOf(HasSubstr("the gradient of unit "), HasSubstr("infinite or NaN"), HasSubstr("cannot be skipped")));
      });
    }
  }
}

/// The units have the same size, and a backend sends any bytes that it is given, so no transport notices the wrong
/// order.
TEST(DeviceInBackward, DifferentGatherOrdersEndTheRun) {
  const EmulatedGpus gpus;
  const std::string told = error_of(ExitCode::kInternal, [] {
    run_ranks(over_backend({.ranks = 2}), [](const Mesh& mesh) {
      Session session(mesh, in_backward(after_backward(ShardingStrategy::kFullShard, DType::kF32)));
      const Batch& batch = session.batches[0];
      at::Tensor x = session.model->embedding(rows_of(batch.tokens, mesh));
      const std::vector<std::size_t> order =
          mesh.rank() == 0 ? std::vector<std::size_t>{0, 1, 2} : std::vector<std::size_t>{0, 2, 1};
      for (const std::size_t block : order) x = session.model->blocks->ptr<BlockImpl>(block)->forward(x);
      session.engine.backward(at::linear(x, session.model->head).pow(2).mean());
      StepResult step = session.engine.step();
      step.wait();
    });
  });
  EXPECT_THAT(told, HasSubstr("different orders"));
}

std::string error_of_wait(StepResult& step) {
  return error_of(ExitCode::kCorruptData, [&] { step.wait(); });
}

/// One element of one rank's gradient is not finite, so only one rank's part of the sum has it. Each rank that waits
/// for the step's result gets an error, even if the rank waits only for a later step's result.
TEST(DeviceInBackward, NonFiniteElementIsReportedByAllRanksEvenLater) {
  const EmulatedGpus gpus;
  for (const bool asks_later : {false, true}) {
    std::vector<std::string> errors(2);
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Session session(mesh, in_backward(after_backward(ShardingStrategy::kFullShard, DType::kF32)));
      session.train(0);
      const bool spoils = mesh.rank() == 1;
      session.model->blocks->ptr<BlockImpl>(1)->up->weight.register_hook([spoils](const at::Tensor& gradient) {
        const at::Tensor spoilt = gradient.clone();
        if (spoils) spoilt.view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
        return spoilt;
      });
      StepResult step = session.train(1);
      if (asks_later) step = session.train(2);
      errors[static_cast<std::size_t>(mesh.rank())] = error_of_wait(step);
      EXPECT_THROW(session.engine.steps_applied(), Error);
    });
    EXPECT_THAT(errors[0], HasSubstr("the gradient of unit blocks.1 is infinite or NaN")) << asks_later;
    EXPECT_THAT(errors[1], HasSubstr("the gradient of a unit that another rank has a part of")) << asks_later;
  }
}

/// Units of different layouts use the same memory in turn. Elements that belong to no parameter are in the same blocks
/// of 256 as elements that do.
TEST(DeviceInBackward, PaddingOfAUnitHoldsNothingOfAnother) {
  constexpr TinyOptions kOdd{.vocab = 7, .width = 10, .hidden = 14, .blocks = 3};
  for (const auto& [states, ranks, cap_mb] : pairwise_of(std::array{StateDType::k8Bit, StateDType::kF32},
                                                         std::array{1, 2}, std::array{0.0005, 0.001, 0.002})) {
    Strategy strategy = after_backward(ShardingStrategy::kNoShard, DType::kBF16);
    strategy.optimizer.state_dtype = states;
    strategy.units.classes.clear();
    strategy.units.bucket_cap_mb = cap_mb;
    strategy.units.first_bucket_mb = cap_mb;
    expect_the_cpus_bits({.ranks = ranks}, strategy, short_run_of(kOdd),
                         std::string(tessera::name_of(states)) + ", buckets of " + std::to_string(cap_mb) + " MiB");
  }
}

/// Parameters stay as they were before the step.
TEST(DeviceInBackward, NothingIsUpdatedAfterANonFiniteGradient) {
  const EmulatedGpus gpus;
  run_ranks(late({.ranks = 1}), [&](const Mesh& mesh) {
    Session session(mesh, in_backward(after_backward(ShardingStrategy::kNoShard, DType::kF32)));
    session.train(0);
    const Values before = session.values();
    session.engine.backward(session.loss(1) * std::numeric_limits<double>::quiet_NaN());
    StepResult step = session.engine.step();
    EXPECT_THROW(step.wait(), Error);
    Values after;
    for (const auto& parameter : session.model->named_parameters())
      after.emplace_back(parameter.key(), parameter.value().detach().clone());
    for (const auto& [name, value] : before) {
      for (const auto& [same, now] : after) {
        EXPECT_TRUE(same != name || same_bits(value, now)) << name;
      }
    }
  });
}

}  // namespace device_in_backward_test
}  // namespace tessera::testing
