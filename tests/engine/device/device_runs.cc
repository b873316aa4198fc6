#include "device_runs.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "emulated_gpu.h"
#include "tessera/checkpoint.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

/// Gives a fixed sequence of yes and no that does not repeat, so that each value of a test's loop is tested with both.
class Turns {
 public:
  bool is_seconds_turn() { return std::popcount(count_++) % 2 == 1; }

 private:
  unsigned count_ = 0;
};

}  // namespace

TrainOptions short_run() {
  TrainOptions options;
  options.steps = 7;  // these are more steps than may be in flight
  options.batch = 12;
  options.model.blocks = 2;
  return options;
}

Strategy strategy_of(const Placed& placed, DType dtype, std::int64_t accumulation) {
  Strategy strategy = tiny_strategy(placed, dtype);
  strategy.gradient_accumulation = accumulation;
  strategy.gradient_clipping = 0.5;
  return strategy;
}

Strategy scheduled(ShardingStrategy kind, DType dtype) {
  Strategy strategy = strategy_of(kind, dtype, 1);
  strategy.lr_schedule.warmup_steps = 30;
  if (dtype != DType::kF16) return strategy;
  strategy.mixed_precision.loss_scale.initial = 16777216.0;
  strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
  strategy.mixed_precision.loss_scale.growth_interval = 4;
  return strategy;
}

Told told_by(Session& session, std::vector<StepResult> steps) {
  for (StepResult& step : steps) step.wait();
  Told told{std::move(steps), session.values(), {}};
  if (session.engine.strategy().ema.decay == 0) return told;
  const Gathered guard(session.engine, Gathered::kEma);
  told.averages = values_of(*session.model);
  return told;
}

void expect_same(const Told& got, const Told& wanted, const std::string& what) {
  ASSERT_EQ(got.steps.size(), wanted.steps.size()) << what;
  for (std::size_t i = 0; i < got.steps.size(); ++i) {
    const StepResult &a = got.steps[i], &b = wanted.steps[i];
    EXPECT_EQ(a.step, b.step) << what;
    const bool is_same_loss =
        a.loss == b.loss || (std::isnan(a.loss) && std::isnan(b.loss));  // a loss is NaN if no microbatch counts
    EXPECT_TRUE(a.overflow || (is_same_loss && a.grad_norm == b.grad_norm))
        << what << ", step " << a.step << ": losses " << a.loss << ", " << b.loss << ", norms " << a.grad_norm << ", "
        << b.grad_norm;
    EXPECT_EQ(a.lr, b.lr) << what << ", step " << a.step;
    EXPECT_EQ(a.overflow, b.overflow) << what << ", step " << a.step;
    EXPECT_EQ(a.spike, b.spike) << what << ", step " << a.step;
    EXPECT_EQ(a.loss_scale, b.loss_scale) << what << ", step " << a.step;
    EXPECT_EQ(a.noise_batch, b.noise_batch) << what << ", step " << a.step;
    EXPECT_EQ(a.noise_scale, b.noise_scale) << what << ", step " << a.step;
    EXPECT_EQ(a.noise_square, b.noise_square) << what << ", step " << a.step;
    EXPECT_EQ(a.noise_variance, b.noise_variance) << what << ", step " << a.step;
  }
  EXPECT_TRUE(all_same_bits(got.values, wanted.values)) << what;
  EXPECT_TRUE(all_same_bits(got.averages, wanted.averages)) << what;
}

Told told_on(const ThreadRanks& ranks, const std::function<Told(const Mesh&)>& body) {
  return of_rank_zero(ranks, body);
}

void on_gpus(int ranks, const std::function<void(const ThreadRanks& joined, const std::string& what)>& body) {
  const EmulatedGpus gpus;
  body(late({.ranks = ranks}), "late");
  if (ranks == 1) return;
  body(on_one_gpu({.ranks = ranks}), "on one GPU");
}

void on_gpus_in_turn(int ranks, const std::function<void(const ThreadRanks& joined, const std::string& what)>& body) {
  static Turns turns;
  if (ranks == 1 || tests_are_long()) return on_gpus(ranks, body);
  const EmulatedGpus gpus;
  if (turns.is_seconds_turn()) {
    body(on_one_gpu({.ranks = ranks}), "on one GPU");
  } else {
    body(late({.ranks = ranks}), "late");
  }
}

void expect_same_on_gpus(const ThreadRanks& ranks, const Trained& on_cpu, const Strategy& strategy,
                         const TrainOptions& options, const std::string& what) {
  static Turns turns;
  const EmulatedGpus gpus;
  const auto expect = [&](const ThreadRanks& joined, const std::string& how) {
    const Trained trained = train_on_threads(joined, strategy, options);
    expect_same_bits(trained, on_cpu, what + how);
    // Units with updates in backward wait for the unused unit, until ranks have agreed on the order.
    if (strategy.optimizer.in_backward && options.model.unused_block) return;
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << what << how;
  };
  expect(late(ranks), "");
  if (ranks.ranks == 1) return;
  // A backend adds in the dtype that is sent.
  const bool may_have_backend = strategy.mixed_precision.reduce == DType::kF32;
  const bool is_backends_turn = may_have_backend && turns.is_seconds_turn();
  if (!is_backends_turn || tests_are_long()) expect(on_one_gpu(ranks), " on one GPU");
  if (is_backends_turn || (may_have_backend && tests_are_long())) expect(over_backend(ranks), " over a backend");
}

void expect_same_on_gpus(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options,
                         const std::string& what) {
  expect_same_on_gpus(ranks, train_on_threads(ranks, strategy, options), strategy, options, what);
}

Told led_through_everything(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                            const OwnRules& own_rules) {
  Session session(mesh, strategy, kTwoBlocks, own_rules);
  Engine& engine = session.engine;
  std::vector<StepResult> steps = train(session, 0, 5);
  const auto more = [&](std::size_t begin, std::size_t end) {
    for (StepResult& step : train(session, begin, end)) steps.push_back(std::move(step));
  };
  if (strategy.lr_schedule.type == LrScheduleType::kManual) {
    engine.set_lr(0.003);
    engine.set_lr(strategy.optimizer.groups.back().name, 0.02);
    engine.set_option("weight_decay", 0.05);
    engine.set_option(strategy.optimizer.groups.back().name, "weight_decay", 0.25);
  }
  { const Gathered guard(engine, Gathered::kEma); }
  more(5, 9);
  engine.set_trainable("blocks.0.*", true);
  more(9, 11);
  engine.set_trainable("blocks.1.*", false);
  save_checkpoint(engine, folder);
  more(11, 13);
  load_checkpoint(engine, folder);
  more(11, 14);
  return told_by(session, std::move(steps));
}

void expect_led_as_on_the_cpu(const std::function<Strategy(Strategy)>& with_rule, const std::string& what,
                              const OwnRules& own_rules) {
  const TestFolder folder;
  int run = 0;
  for (const auto& [kind, dtype, by_hand] :
       pairwise_of(kThree, std::array{DType::kBF16, DType::kF16}, std::array{false, true})) {
    Strategy strategy = with_rule(scheduled(kind, dtype));
    strategy.ema.decay = 0.75;
    if (by_hand) strategy.lr_schedule = {.type = LrScheduleType::kManual};
    const auto body = [&] {
      const std::string own = (folder / std::to_string(run++)).string();
      return [&, own](const Mesh& mesh) { return led_through_everything(mesh, strategy, own, own_rules); };
    };
    const std::string of =
        what + ", " + name_of(kind) + ", " + std::string(name_of(dtype)) + (by_hand ? ", by hand " : " ");
    const Told wanted = told_on({.ranks = 2}, body());
    on_gpus_in_turn(2, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same(told_on(joined, body()), wanted, of + how);
    });
  }
}

void expect_left_out_as_on_the_cpu(const std::function<Strategy(Strategy)>& with_rule, const std::string& what,
                                   const OwnRules& own_rules) {
  for (const ShardingStrategy kind : kThree) {
    Strategy strategy = with_rule(strategy_of(kind, DType::kBF16, 1));
    strategy.ema.decay = 0.75;
    const auto body = [&](const Mesh& mesh) {
      Session session(mesh, strategy, kTwoBlocks, own_rules);
      std::vector<StepResult> steps;
      for (std::size_t i = 0; i < 8; ++i) {
        session.model->options.blocks = i % 3 == 0 ? 2 : 1;
        steps.push_back(session.train(i));
      }
      return told_by(session, std::move(steps));
    };
    const Told wanted = told_on({.ranks = 2}, body);
    on_gpus_in_turn(2, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same(told_on(joined, body), wanted, what + ", " + name_of(kind) + ", " + how);
    });
  }
}

std::string name_of(const RuleCase& of) {
  return std::string(name_of(of.dtype)) + "_ranks" + std::to_string(of.ranks) + "_states" +
         tessera::name_of(of.states).substr(0, 1);
}

std::vector<StepResult> train(Session& session, std::size_t begin, std::size_t end) {
  std::vector<StepResult> steps;
  for (std::size_t i = begin; i < end; ++i) steps.push_back(session.train(i));
  return steps;
}

Told saved_and_trained_on(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                          const OwnRules& own_rules) {
  Session session(mesh, strategy, kTwoBlocks, own_rules);
  train(session, 0, 6);
  save_checkpoint(session.engine, folder);
  return told_by(session, train(session, 6, 12));
}

Told loaded_and_trained_on(const Mesh& mesh, const Strategy& strategy, const std::string& folder,
                           std::vector<std::string>& inexact, const OwnRules& own_rules) {
  Session session(mesh, strategy, kTwoBlocks, own_rules);
  train(session, 7, 9);
  const LoadedCheckpoint loaded = load_checkpoint(session.engine, folder);
  EXPECT_EQ(loaded.step, 6);
  if (mesh.rank() == 0) inexact = loaded.inexact;
  return told_by(session, train(session, 6, 12));
}

void expect_checkpoints_as_on_the_cpu(int ranks, const Strategy& strategy, const std::string& what,
                                      const OwnRules& own_rules) {
  const TestFolder of_cpu;
  std::vector<std::string> inexact;
  const auto save_to = [&](const TestFolder& folder) {
    return [&](const Mesh& mesh) { return saved_and_trained_on(mesh, strategy, folder.path().string(), own_rules); };
  };
  const auto load_from = [&](const TestFolder& folder) {
    return [&](const Mesh& mesh) {
      return loaded_and_trained_on(mesh, strategy, folder.path().string(), inexact, own_rules);
    };
  };
  const Told wanted = told_on({.ranks = ranks}, save_to(of_cpu));
  const TestFolder of_gpu;
  static Turns turns;
  const bool are_late_alone = turns.is_seconds_turn() && !tests_are_long();
  on_gpus(ranks, [&](const ThreadRanks& joined, const std::string& how) {
    if (how != "late" && are_late_alone) return;
    const std::string where = what + ", " + std::to_string(ranks) + " ranks " + how;
    const TestFolder own;
    expect_same(told_on(joined, save_to(own)), wanted, where + ": saved");
    expect_same(told_on(joined, load_from(own)), wanted, where + ": loaded");
    EXPECT_TRUE(inexact.empty()) << where << ": " << inexact[0];
    expect_same(told_on(joined, load_from(of_cpu)), wanted, where + ": loaded what the CPU saved");
    ASSERT_EQ(inexact.size(), 1) << where;
    EXPECT_NE(inexact[0].find("of a run on the CPU"), std::string::npos) << inexact[0];
    if (how == "late") told_on(joined, save_to(of_gpu));
  });
  expect_same(told_on({.ranks = ranks}, load_from(of_gpu)), wanted, what + ": loaded by the CPU");
  ASSERT_EQ(inexact.size(), 1) << what;
  EXPECT_NE(inexact[0].find("of a run on a GPU"), std::string::npos) << inexact[0];
}

}  // namespace tessera::testing
