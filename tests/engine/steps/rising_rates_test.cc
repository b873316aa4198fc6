// Tests rates that depend on the number of samples: a warm-up over samples or epochs, and the growth with the global
// batch. Updates in backward and outer steps are tested too.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace rising_rates_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::int64_t kRows = 24;  // samples of a step, over all ranks

/// Makes one step of the session. Each backward gets its number of samples.
StepResult train_samples(Session& session, std::size_t i) {
  const std::int64_t rows = kRows / session.mesh.world_size() / static_cast<std::int64_t>(session.microbatches);
  while (!session.engine.step_is_due()) session.engine.backward(session.loss(i), {.samples = rows});
  return session.engine.step();
}

struct RatedRun {
  std::vector<double> rates;
  Values values;
};

RatedRun run_of(const Mesh& mesh, const Strategy& strategy, std::size_t steps) {
  Session session(mesh, strategy);
  RatedRun run;
  for (std::size_t i = 0; i < steps; ++i) run.rates.push_back(train_samples(session, i).lr);
  EXPECT_EQ(session.engine.samples_seen(), kRows * static_cast<std::int64_t>(steps));
  run.values = session.values();
  return run;
}

TEST(RisingRates, WarmUpOverSamplesOrEpochsEqualsThatOverSteps) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.lr_schedule.warmup_steps = 4;
    const RatedRun wanted = run_of(mesh, strategy, 6);
    EXPECT_LT(wanted.rates[0], wanted.rates[3]);
    strategy.lr_schedule = {.warmup_samples = 4 * kRows};
    const RatedRun over_samples = run_of(mesh, strategy, 6);
    EXPECT_EQ(over_samples.rates, wanted.rates);
    EXPECT_TRUE(all_same_bits(over_samples.values, wanted.values));
    strategy.lr_schedule = {.warmup_epochs = 0.5, .epoch_samples = 8 * kRows};
    EXPECT_EQ(run_of(mesh, strategy, 6).rates, wanted.rates);
  });
}

TEST(RisingRates, UpdatesInBackwardHaveTheRatesAndBitsOfThoseAfterIt) {
  const auto rising = [](Strategy& s) {
    s.gradient_clipping = 0;
    s.lr_schedule = {.warmup_from = 0.25, .base_batch_size = 8, .warmup_samples = 3 * kRows};
  };
  on_placements(
      kInMemory, 2,
      [](const Mesh& mesh, const Strategy& after) {
        const RatedRun wanted = run_of(mesh, after, 5);
        EXPECT_DOUBLE_EQ(wanted.rates[0], 0.25 * 3 * after.optimizer.lr);
        EXPECT_DOUBLE_EQ(wanted.rates[3], 3 * after.optimizer.lr);
        Strategy in_backward = after;
        in_backward.optimizer.in_backward = true;
        const RatedRun got = run_of(mesh, in_backward, 5);
        EXPECT_EQ(got.rates, wanted.rates);
        EXPECT_TRUE(all_same_bits(got.values, wanted.values));
      },
      rising);
}

TEST(RisingRates, SquareRootOfTheBatchHoldsForUpdatesInBackward) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.gradient_clipping = 0;
    strategy.lr_schedule = {.base_batch_size = 6, .batch_scaling = BatchScaling::kSquareRoot};
    const RatedRun wanted = run_of(mesh, strategy, 2);
    EXPECT_DOUBLE_EQ(wanted.rates[0], 2 * strategy.optimizer.lr);
    strategy.optimizer.in_backward = true;
    const RatedRun got = run_of(mesh, strategy, 2);
    EXPECT_EQ(got.rates, wanted.rates);
    EXPECT_TRUE(all_same_bits(got.values, wanted.values));
  });
}

/// Sets SGD without clipping. The mean of the replicas' weights is then equal to the result of the mean gradient.
Strategy sgd_of_replicas(const LrScheduleConfig& schedule) {
  Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
  strategy.mesh = {2, 1};
  strategy.optimizer = {.type = OptimizerType::kSgd, .lr = 0.02, .weight_decay = 0};
  strategy.gradient_clipping = 0;
  strategy.lr_schedule = schedule;
  return strategy;
}

TEST(RisingRates, OuterStepOfEachStepHasTheRatesOfPlainTraining) {
  for (const BatchScaling scaling : {BatchScaling::kLinear, BatchScaling::kSquareRoot}) {
    const LrScheduleConfig schedule{.base_batch_size = 6, .batch_scaling = scaling, .warmup_samples = 2 * kRows};
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = sgd_of_replicas(schedule);
      const RatedRun wanted = run_of(mesh, strategy, 4);
      EXPECT_DOUBLE_EQ(wanted.rates[3], (scaling == BatchScaling::kLinear ? 4 : 2) * 0.02);
      strategy.sync.type = SyncType::kLocalSgd;
      strategy.sync.every = 1;
      const RatedRun got = run_of(mesh, strategy, 4);
      EXPECT_EQ(got.rates, wanted.rates);
      expect_close(got.values, wanted.values, 1e-6, name_of(scaling));
    });
  }
}

TEST(RisingRates, ReplicasThatBeginToTrainApartKeepTheirSamplesAndRates) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Strategy strategy = sgd_of_replicas({.base_batch_size = kRows, .warmup_samples = 4 * kRows});
    const RatedRun wanted = run_of(mesh, strategy, 6);
    strategy.sync = {.type = SyncType::kPostLocalSgd, .every = 2, .start_step = 2};
    EXPECT_EQ(run_of(mesh, strategy, 6).rates, wanted.rates);
  });
}

TEST(RisingRates, OuterOptimizersLeaveTheRatesOfPlainTraining) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Strategy strategy = sgd_of_replicas({.base_batch_size = 6, .warmup_samples = 4 * kRows});
    const RatedRun wanted = run_of(mesh, strategy, 6);
    EXPECT_LT(wanted.rates[2], wanted.rates[3]);
    EXPECT_DOUBLE_EQ(wanted.rates[5], 4 * 0.02);
    for (const SyncType type : {SyncType::kDiloco, SyncType::kStreamingDiloco}) {
      strategy.sync = {.type = type, .every = 2};
      if (type == SyncType::kStreamingDiloco) strategy.sync.fragments = 2;
      const RatedRun got = run_of(mesh, strategy, 6);
      EXPECT_EQ(got.rates, wanted.rates) << name_of(type);
      EXPECT_FALSE(all_same_bits(got.values, wanted.values)) << name_of(type);
    }
  });
}

TEST(RisingRates, ResumedRunGoesOnInTheMiddleOfTheRise) {
  const TestFolder saved, committed;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.lr_schedule.warmup_epochs = 2;
    std::vector<double> wanted, got;
    {
      Session first(mesh, strategy);
      first.engine.set_epoch_samples(3 * kRows);
      for (std::size_t i = 0; i < 2; ++i) train_samples(first, i);
      save_checkpoint(first.engine, saved.path());
      for (std::size_t i = 2; i < 5; ++i) wanted.push_back(train_samples(first, i).lr);
      EXPECT_LT(wanted[0], wanted[2]);
    }
    Session second(mesh, strategy);
    EXPECT_THAT(load_checkpoint(second.engine, saved.path()).inexact, IsEmpty());
    EXPECT_EQ(second.engine.samples_seen(), 2 * kRows);
    second.engine.set_epoch_samples(3 * kRows);
    for (std::size_t i = 2; i < 5; ++i) got.push_back(train_samples(second, i).lr);
    EXPECT_EQ(got, wanted);

    strategy.lr_schedule.epoch_samples = 3 * kRows;
    strategy.durable = {.every = 1, .dir = committed.path().string()};
    {
      Session third(mesh, strategy);
      for (std::size_t i = 0; i < 2; ++i) train_samples(third, i);
      commit_durable(third.engine);
    }
    Session fourth(mesh, strategy);
    const auto resumed = resume_durable(fourth.engine);
    ASSERT_TRUE(resumed);
    EXPECT_THAT(resumed->inexact, IsEmpty());
    EXPECT_EQ(fourth.engine.samples_seen(), 2 * kRows);
    EXPECT_EQ(train_samples(fourth, 2).lr, wanted[0]);
  });
}

TEST(RisingRates, CheckpointWithoutSamplesIsSaidToBeginTheRiseAgain) {
  const TestFolder folder;
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
    {
      Session untold(mesh, strategy);
      untold.train(0);
      save_checkpoint(untold.engine, folder.path());
    }
    strategy.lr_schedule.warmup_samples = 100;
    Session session(mesh, strategy);
    EXPECT_THAT(load_checkpoint(session.engine, folder.path()).inexact,
                ElementsAre(HasSubstr("rises from its beginning again")));
  });
}

TEST(RisingRates, RateOfTheNextStepTakesItForAsLargeAsTheLatest) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
    strategy.lr_schedule = {.base_batch_size = 7, .warmup_samples = 5 * kRows};
    Session session(mesh, strategy);
    train_samples(session, 0);
    const double next = session.engine.lr();
    EXPECT_DOUBLE_EQ(next, strategy.optimizer.lr * 2 / 6);
    EXPECT_DOUBLE_EQ(train_samples(session, 1).lr, next * kRows / 7);
  });
}

TEST(RisingRates, SamplesOfAMicrobatchWithTwoLossesCountOnce) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
    strategy.lr_schedule = {.base_batch_size = 4};
    Session session(mesh, strategy);
    const at::Tensor loss = session.loss(0);
    session.engine.backward(loss, {.samples = 8, .retain_graph = true});
    session.engine.backward(loss, {.samples = 8});
    EXPECT_DOUBLE_EQ(session.engine.step().lr, 2 * strategy.optimizer.lr);
    EXPECT_EQ(session.engine.samples_seen(), 8);
    const at::Tensor other = session.loss(1);
    session.engine.backward(other, {.retain_graph = true});
    EXPECT_THAT(usage_error_of([&] { session.engine.backward(other); }), HasSubstr("number of samples"));
    session.engine.backward(other, {.samples = 4});
    EXPECT_DOUBLE_EQ(session.engine.step().lr, strategy.optimizer.lr);
  });
}

TEST(RisingRates, MissingSamplesAndEpochsAreNamed) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.lr_schedule.warmup_epochs = 2;
    Session session(mesh, strategy);
    const at::Tensor loss = session.loss(0);
    EXPECT_THAT(usage_error_of([&] { session.engine.backward(loss, {.samples = 3}); }),
                AllOf(HasSubstr("warmup_epochs"), HasSubstr("set_epoch_samples"), HasSubstr("hint:")));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_epoch_samples(0); }), HasSubstr("from 1 to 1e12, got 0"));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_epoch_samples(50 + mesh.rank()); }),
                AllOf(HasSubstr("50 samples on rank 0, and 51 on rank 1"), HasSubstr("hint:")));
    session.engine.set_epoch_samples(50);
    EXPECT_EQ(session.engine.strategy().lr_schedule.epoch_samples, 50);
    EXPECT_THAT(usage_error_of([&] { session.engine.backward(loss); }),
                AllOf(HasSubstr("warmup_samples"), HasSubstr("number of samples"), HasSubstr("hint:")));
    session.engine.backward(loss, {.samples = 3});
    EXPECT_THAT(usage_error_of([&] { session.engine.set_epoch_samples(60); }), HasSubstr("between backward and step"));
    session.engine.step();
  });
}

}  // namespace rising_rates_test
}  // namespace tessera::testing
