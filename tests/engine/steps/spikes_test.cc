// Tests loss spikes: which steps count as spikes, and that a run with a skipped step equals a run without that batch.
// A run that goes back to a checkpoint must equal a run without the steps since that checkpoint.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <limits>

#include "engine/step/agree/loss_spikes.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tessera/error.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace spikes_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum SpikeVerdict;

/// Adds the loss of the next step, and returns the verdict on it.
SpikeVerdict add(LossSpikes& spikes, double loss) {
  const double median = spikes.median();
  const SpikeVerdict verdict = spike_verdict(spikes.rule(), spikes.state(), median, loss);
  note_loss(spikes.rule(), spikes.state(), spikes.losses().data(), verdict, median, loss);
  return verdict;
}

std::vector<SpikeVerdict> verdicts(LossSpikes& spikes, const std::vector<double>& losses) {
  std::vector<SpikeVerdict> all;
  for (const double loss : losses) all.push_back(add(spikes, loss));
  return all;
}

LossSpikes spikes_of(double factor, std::int64_t window) { return LossSpikes({SpikeAction::kSkip, factor, window}); }

TEST(LossSpikes, LossAboveTheFullWindowsMedianIsASpike) {
  LossSpikes odd = spikes_of(2, 3);
  EXPECT_THAT(verdicts(odd, {9, 1, 2, 4, 4.1, 4.1}), ElementsAre(kNone, kNone, kNone, kNone, kSpike, kChanged));
  LossSpikes even = spikes_of(1.5, 4);
  verdicts(even, {4, 1, 3, 2});
  EXPECT_EQ(add(even, 3.75), kNone);  // 3.75 is 1.5 times 2.5
  EXPECT_EQ(even.state().median, 2.5);
  EXPECT_EQ(add(even, 3.76 * 1.1), kSpike);  // the window is 1, 3, 2, 3.75
  EXPECT_EQ(even.state().median, 2.5);
  EXPECT_EQ(add(even, 3.75), kNone);
}

TEST(LossSpikes, SpikesStayOutOfTheWindowUntilHalfOfItIsSpikes) {
  LossSpikes spikes = spikes_of(2, 4);
  verdicts(spikes, {1, 1, 1, 1});
  EXPECT_THAT(verdicts(spikes, {3, 3, 1, 3, 3, 3}), ElementsAre(kSpike, kSpike, kNone, kSpike, kSpike, kChanged));
  // The window of losses has started again, and has one loss, 3.
  EXPECT_THAT(verdicts(spikes, {50, 3, 3, 7}), ElementsAre(kNone, kNone, kNone, kSpike));
  LossSpikes small = spikes_of(2, 1);
  EXPECT_THAT(verdicts(small, {1, 3, 3, 3}), ElementsAre(kNone, kSpike, kChanged, kNone));
}

TEST(LossSpikes, NonFiniteLossesStayOutOfTheWindow) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  LossSpikes spikes = spikes_of(2, 2);
  EXPECT_THAT(verdicts(spikes, {NAN, 1, kInfinity, 1, NAN, kInfinity, 2.5}),
              ElementsAre(kNone, kNone, kNone, kNone, kNone, kSpike, kChanged));
}

TEST(LossSpikes, RestoredHistoryGivesTheSameVerdicts) {
  const std::vector<double> losses = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9};
  for (std::size_t cut = 0; cut < losses.size(); ++cut) {
    LossSpikes whole = spikes_of(1.3, 3), first = spikes_of(1.3, 3), second = spikes_of(1.3, 3);
    for (std::size_t i = 0; i < losses.size(); ++i) {
      if (i == cut) second.restore(first.history());
      EXPECT_EQ(add(i < cut ? first : second, losses[i]), add(whole, losses[i])) << cut << " " << i;
    }
  }
  LossSpikes narrow = spikes_of(2, 2);
  narrow.restore({{9, 9, 1, 2}, 0});
  EXPECT_THAT(narrow.history().losses, ElementsAre(1, 2));
}

constexpr double kLeftOut = 0;

/// The results of a run with one step for each height. The last rank's loss is its batch's loss times the height. If
/// the height is 0, the batch is left out.
struct Course {
  std::vector<StepResult> steps;
  Values values;
  double next_scale = 1;
  std::int64_t applied = 0;
};

/// Makes a run whose losses have the given heights. `after_step` gets each step's number.
Course train(const Mesh& mesh, const Strategy& strategy, const std::vector<double>& heights,
             const std::function<void(Engine&, std::size_t)>& after_step = nullptr) {
  Session session(mesh, strategy);
  Course run;
  for (std::size_t i = 0; i < heights.size(); ++i) {
    if (heights[i] == kLeftOut) continue;
    const bool is_last = mesh.rank() == mesh.world_size() - 1;
    session.engine.backward(session.loss(i) * (is_last ? heights[i] : 1.0));
    run.steps.push_back(session.engine.step());
    if (after_step) after_step(session.engine, i);
  }
  run.values = session.values();
  run.next_scale = session.engine.loss_scale();
  run.applied = session.engine.steps_applied();
  return run;
}

std::vector<std::int64_t> spikes_in(const Course& run) {
  std::vector<std::int64_t> steps;
  for (const StepResult& step : run.steps) {
    if (step.spike) steps.push_back(step.step);
  }
  return steps;
}

/// Sets numbers that depend on the count of steps, so that a wrong count changes the result.
void count_steps(Strategy& strategy) {
  strategy.lr_schedule.type = LrScheduleType::kCosine;
  strategy.lr_schedule.total_steps = 20;
  strategy.ema.decay = 0.9;
}

void skip_spikes(Strategy& strategy) {
  count_steps(strategy);
  strategy.on_spike = {.action = SpikeAction::kSkip, .factor = 3, .window = 3};
}

const std::vector<double> kOneSpike = {1, 1, 1, 1, 40, 1, 1, 1}, kWithoutIt = {1, 1, 1, 1, kLeftOut, 1, 1, 1};

Values plain_values_without_the_spike(const Strategy& strategy) {
  Tiny model = make_tiny({}, false);
  const OptimizerConfig& config = strategy.optimizer;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(config.lr)
                                                         .betas({config.beta1, config.beta2})
                                                         .eps(config.eps)
                                                         .weight_decay(config.weight_decay));
  const auto batches = make_batches(6, 24, 5, TinyOptions{}.vocab);
  for (std::size_t i = 0; i < kWithoutIt.size(); ++i) {
    if (kWithoutIt[i] == kLeftOut) continue;
    optimizer.zero_grad();
    const Batch& batch = batches[i % batches.size()];
    model->forward(batch.tokens, batch.targets).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), strategy.gradient_clipping);
    optimizer.step();
  }
  return values_of(*model);
}

TEST(Spikes, SkippedStepEqualsARunWithoutItsBatch) {
  for (const int ranks : {1, 2, 3}) {
    FirstValues first;
    const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
      const Course skipping = train(mesh, strategy, kOneSpike);
      Strategy unaware = strategy;
      unaware.on_spike = {};
      const Course wanted = train(mesh, unaware, kWithoutIt);
      EXPECT_THAT(spikes_in(skipping), ElementsAre(5));
      EXPECT_EQ(skipping.applied, 7);
      EXPECT_EQ(skipping.steps.back().lr, wanted.steps.back().lr);
      EXPECT_TRUE(all_same_bits(skipping.values, wanted.values)) << ranks << " ranks";
      if (mesh.rank() == 0) {
        EXPECT_TRUE(first.same_bits(skipping.values)) << ranks << " ranks, another strategy";
      }
    };
    on_each_placement(ranks, body, skip_spikes);
  }
}

TEST(Spikes, SkippedStepEqualsLibTorchWithoutTheBatch) {
  const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
    expect_close(train(mesh, strategy, kOneSpike).values, plain_values_without_the_spike(strategy), 1e-5,
                 name_of(strategy.strategy));
  };
  const auto adjust = [](Strategy& s) { s.on_spike = {.action = SpikeAction::kSkip, .factor = 3, .window = 3}; };
  on_placements(kInMemory, 2, body, adjust);
}

TEST(Spikes, LossScaleDoesNotCountSkippedSteps) {
  const auto adjust = [](Strategy& s) {
    skip_spikes(s);
    s.mixed_precision.loss_scale = {.initial = 64, .growth_interval = 7};
  };
  const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
    const Course run = train(mesh, strategy, kOneSpike);
    EXPECT_THAT(spikes_in(run), ElementsAre(5));
    EXPECT_EQ(run.steps.back().loss_scale, 64);  // six finite steps came before the spike
    EXPECT_EQ(run.next_scale, 128);
  };
  on_placements(std::span(kOnePerPlacement).subspan(3, 1), 2, body, adjust, DType::kF16);
}

void go_back(Strategy& strategy) {
  count_steps(strategy);
  strategy.on_spike = {.action = SpikeAction::kRollback, .factor = 3, .window = 3};
  strategy.checkpoint.dir = "elsewhere";
}

void go_back_beside_saves(Strategy& strategy) {
  go_back(strategy);
  strategy.checkpoint.async = true;
}

/// A spike in step 7 undoes all steps since step 4, and training continues with the next data.
TEST(Spikes, RollbackEqualsARunWithoutTheStepsSince) {
  for (const auto& adjust : {go_back, go_back_beside_saves}) {
    const TestFolder folder;
    const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
      const auto save = [&](Engine& engine, std::size_t i) {
        if (i + 1 == 4) save_checkpoint(engine, folder / "c");
      };
      const Course run = train(mesh, strategy, {1, 1, 1, 1, 1, 1, 40, 1, 1, 1}, save);
      Strategy unaware = strategy;
      unaware.on_spike = {};
      const Course wanted = train(mesh, unaware, {1, 1, 1, 1, 0, 0, 0, 1, 1, 1});
      EXPECT_THAT(spikes_in(run), ElementsAre(7));
      EXPECT_EQ(run.steps.back().step, 10) << "step numbers go on";
      EXPECT_EQ(run.applied, 7);
      EXPECT_TRUE(all_same_bits(run.values, wanted.values));
    };
    on_each_placement(2, body, adjust);
  }
}

/// A run goes back to the same checkpoint three times. Then a spike is skipped, and then the higher loss counts as
/// normal. If there is no checkpoint, spikes are skipped at once.
TEST(Spikes, RollbacksToOneCheckpointEndAfterThree) {
  const TestFolder folder;
  for (const bool saves : {true, false}) {
    const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
      const auto save = [&](Engine& engine, std::size_t i) {
        if (saves && i + 1 == 4) save_checkpoint(engine, folder / "c");
      };
      const Course run = train(mesh, strategy, {1, 1, 1, 1, 40, 40, 40, 40, 40, 40}, save);
      Strategy unaware = strategy;
      unaware.on_spike = {};
      if (saves) {
        EXPECT_THAT(spikes_in(run), ElementsAre(5, 6, 7, 8));
        EXPECT_TRUE(all_same_bits(run.values, train(mesh, unaware, {1, 1, 1, 1, 0, 0, 0, 0, 40, 40}).values));
      } else {
        EXPECT_THAT(spikes_in(run), ElementsAre(5));
        EXPECT_TRUE(all_same_bits(run.values, train(mesh, unaware, {1, 1, 1, 1, 0, 40, 40, 40, 40, 40}).values));
      }
    };
    on_placements(std::span(kOnePerPlacement).subspan(3, 1), 2, body, go_back);
  }
}

/// The checkpoint holds the window of the latest losses: a run that continues from it notices a spike right after it.
TEST(Spikes, ResumedRunFindsTheSameSpikes) {
  const TestFolder folder;
  const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
    const Course whole = train(mesh, strategy, kOneSpike, [&](Engine& engine, std::size_t i) {
      if (i + 1 == 4) save_checkpoint(engine, folder / "c");
    });
    Session session(mesh, strategy);
    const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder / "c");
    for (auto i = static_cast<std::size_t>(loaded.step); i < kOneSpike.size(); ++i) {
      const bool is_last = mesh.rank() == mesh.world_size() - 1;
      session.engine.backward(session.loss(i) * (is_last ? kOneSpike[i] : 1.0));
      EXPECT_EQ(session.engine.step().spike, whole.steps[i].spike) << i;
    }
    EXPECT_TRUE(all_same_bits(session.values(), whole.values));
  };
  on_placements(std::span(kOnePerPlacement).subspan(3, 1), 2, body, skip_spikes);
}

/// A commit ("durable") holds the window of the latest losses, too.
TEST(Spikes, RunResumedFromACommitFindsTheSameSpikes) {
  const TestFolder folder;
  const auto body = [&](const Mesh& mesh, const Strategy& strategy) {
    Strategy plain = strategy;
    plain.durable = {};
    const Course whole = train(mesh, plain, kOneSpike);
    const auto train_on = [&](Session& session, std::size_t i) {
      const bool is_last = mesh.rank() == mesh.world_size() - 1;
      session.engine.backward(session.loss(i) * (is_last ? kOneSpike[i] : 1.0));
      EXPECT_EQ(session.engine.step().spike, whole.steps[i].spike) << i;
      commit_durable(session.engine);
    };
    {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 4; ++i) train_on(session, i);
    }
    Session session(mesh, strategy);
    const auto resumed = resume_durable(session.engine);
    ASSERT_TRUE(resumed.has_value());
    EXPECT_EQ(resumed->step, 4);
    for (std::size_t i = 4; i < kOneSpike.size(); ++i) train_on(session, i);
    EXPECT_TRUE(all_same_bits(session.values(), whole.values));
  };
  on_placements(std::span(kOnePerPlacement).subspan(3, 1), 2, body, [&](Strategy& strategy) {
    skip_spikes(strategy);
    strategy.durable = {.every = 4, .dir = (folder / "durable").string()};
  });
}

TEST(Spikes, NegativeLossIsRefused) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, skip_spikes));
    session.engine.backward(session.loss(0) - 100);
    EXPECT_THAT(error_of(ExitCode::kConfig, [&] { session.engine.step(); }),
                AllOf(HasSubstr("step 1"), HasSubstr("/on_spike/action"), HasSubstr("hint:")));
  });
}

}  // namespace spikes_test
}  // namespace tessera::testing
