// Tests wrong calls that plain LibTorch does not have, ranks that act differently, and exceptions.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/programs/models.h"
#include "tests/support/limits/patience.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

// Seconds on a machine at rest: the limit of a call in which a rank waits for a missing rank, and the limit for the end
// of all ranks.
constexpr double kLimitOfACall = 0.25, kLimitOfAll = 4;

// ---- calls in the wrong order ------------------------------------------------------------------------------------

TEST(Misuse, WrongCallsAreUsageErrorsAndHarmless) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 3; ++step) {
          const at::Tensor loss = loss_of(scene, model, step);
          scene.refused([&] { trainer->step(); }, {{"step wants 1 microbatches", "backward"}});
          scene.refused([&] { trainer->backward(at::Tensor()); }, {{"scalar loss", "undefined"}});
          const at::Tensor vector = model->forward(scene.rows(noise(step, 5))).pow(2).mean(1);
          scene.refused([&] { trainer->backward(vector); }, {{"scalar loss", ".mean()"}});
          scene.refused([&] { trainer->backward(loss.detach()); }, {{"requires no gradients", "hint"}});
          scene.refused([&] { trainer->backward(at::ones({}, at::kLong)); }, {{"floating"}});
          scene.refused([] { tessera::backward(at::ones({}), {}); }, {{"at least one Engine"}});
          trainer->backward(loss);
          scene.refused([&] { trainer->backward(loss_of(scene, model, step)); },
                        {{"gradient_accumulation is 1", "step()"}});
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

TEST(Misuse, UnmatchedPatternsAreRefusedAndHarmless) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 3; ++step) {
          scene.refused([&] { trainer->engine()->set_trainable("no.such", true); }, {{"matches no parameter"}});
          trainer->backward(loss_of(scene, model, step));
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

TEST(Misuse, MissingSampleCountsAreRefusedAndHarmless) {
  // The scaled rate equals the strategy's rate, since a step has 12 samples and base_batch_size is 12.
  const Adjust adjust = [](Strategy& s) {
    linear_units(s);
    s.lr_schedule.base_batch_size = 12;
  };
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 3; ++step) {
          const at::Tensor loss = loss_of(scene, model, step);
          scene.refused([&] { trainer->backward(loss); }, {{"base_batch_size", "MicrobatchInfo::samples"}});
          // Only one rank makes the wrong call.
          if (scene.rank() == 0) {
            scene.refused([&] { trainer->backward(loss, {.samples = -1}); }, {{"MicrobatchInfo::samples"}});
          }
          trainer->backward(loss, {.samples = scene.rows(noise(step, 5)).size(0)});
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {adjust});
}

TEST(Misuse, StepAndBackwardUnderAGuardAreRefusedAndHarmless) {
  for (Gathered::Mode mode : {Gathered::kRead, Gathered::kWrite}) {
    expect_like_plain(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          const auto trainer = scene.trainer(model);
          for (std::int64_t step = 0; step < 3; ++step) {
            const at::Tensor loss = loss_of(scene, model, step);
            if (mode == Gathered::kWrite && !scene.is_plain()) {
              Gathered guard(*trainer->engine(), mode);
              scene.refused([&] { trainer->backward(loss); }, {{"Gathered", "close that guard"}});
              guard.close();
            }
            // kWrite wrote new values into the parameters after the first graph was made, so this loss has a new graph.
            trainer->backward(loss_of(scene, model, step));
            if (!scene.is_plain()) {
              Gathered guard(*trainer->engine(), mode);
              scene.refused([&] { trainer->step(); }, {{"Gathered", "close that guard"}});
              guard.close();
            }
            trainer->step();
          }
          scene.note(*trainer, *model);
        },
        {linear_units});
  }
}

// A graph that was made before the step that changed its parameters must not be run backward.
TEST(Misuse, BackwardOfAGraphOlderThanTheStepIsAnError) {
  on_matrix(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        const at::Tensor first = loss_of(scene, model, 0), second = loss_of(scene, model, 1);
        trainer->backward(first);
        trainer->step();
        scene.refused([&] { trainer->backward(second); }, {{"modified by an inplace operation"}, std::nullopt});
      },
      {.adjust = linear_units});
}

// ---- ranks that act differently ----------------------------------------------------------------------------------

enum class Where { kFullShard, kGathered, kSeveralRanks };

/// Checks that `body` soon ends in an error on every rank.
void expect_all_end(const std::function<void(Scene&)>& body, Where where = Where::kGathered) {
  on_matrix(
      [&](Scene& scene) {
        if (scene.mesh().world_size() == 1 || (where != Where::kSeveralRanks && !scene.is_sharded())) return;
        if (where == Where::kFullShard && scene.strategy().strategy != ShardingStrategy::kFullShard) return;
        Deadline soon{std::chrono::duration<double>(kLimitOfAll)};
        scene.refused([&] { body(scene); }, {{"rank"}, std::nullopt});
        EXPECT_FALSE(soon.passed());
      },
      {.adjust = linear_units, .timeout_s = patient_s(kLimitOfACall)});
}

// Only FULL_SHARD is tested. Under SHARD_GRAD_OP, gathered units stay gathered until the step, so the next forward of
// the other ranks makes the gathers that rank 0 has begun, and nothing is wrong.
TEST(Misuse, ForwardOnOneRankAloneEndsInAnError) {
  for (bool evaluates : {true, false}) {
    expect_all_end(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          const auto trainer = scene.trainer(model);
          if (scene.rank() == 0) {
            const at::AutoGradMode mode(!evaluates);
            (void)model->forward(noise(9, 5));
          }
          train(scene, *trainer, model, 0, 2);
        },
        Where::kFullShard);
  }
}

TEST(Misuse, GatheredOnOneRankAloneEndsInAnError) {
  for (Gathered::Mode mode : {Gathered::kRead, Gathered::kWrite}) {
    expect_all_end(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          const auto trainer = scene.trainer(model);
          if (scene.rank() == 0) Gathered(*trainer->engine(), mode).close();
          train(scene, *trainer, model, 0, 2);
        },
        Where::kSeveralRanks);
  }
}

TEST(Misuse, ParameterReadOnOneRankAloneEndsInAnError) {
  expect_all_end([](Scene& scene) {
    Mlp model = mlp(5, 9, 3);
    const auto trainer = scene.trainer(model);
    for (std::int64_t step = 0; step < 2; ++step) {
      trainer->backward(loss_of(scene, model, step));
      trainer->step();
      if (scene.rank() == 0) (void)model->second->weight.norm().item<double>();
    }
  });
}

TEST(Misuse, UnitRunOnSomeRanksEndsInAnError) {
  expect_all_end([](Scene& scene) {
    Mlp model = mlp(9, 9, 3);
    const auto trainer = scene.trainer(model);
    for (std::int64_t step = 0; step < 2; ++step) {
      const at::Tensor x = scene.rows(noise(step, 9));
      trainer->backward((scene.rank() == 0 ? model->third(at::tanh(model->first(x))) : model->forward(x)).mean());
      trainer->step();
    }
  });
}

// ---- exceptions --------------------------------------------------------------------------------------------------

TEST(Misuse, ExceptionOnOneRankEndsAllWithTheFirstCause) {
  for_each_cell([](const Cell& cell) {
    for (int attempt = 0; attempt < 2; ++attempt) {  // the second attempt shows that the process can continue
      Deadline soon(std::chrono::seconds(30));
      std::string cause;
      try {
        run_ranks({.ranks = cell.ranks, .timeout_s = 60}, [&](const Mesh& mesh) {
          Scene scene(strategy_for(cell.placed, linear_units), mesh);
          Mlp model = mlp(5, 9, 3);
          const auto trainer = scene.trainer(model);
          for (std::int64_t step = 0; step < 4; ++step) {
            const at::Tensor loss = loss_of(scene, model, step);
            if (step == 2 && mesh.rank() == cell.ranks - 1) throw std::runtime_error("the data file has ended");
            trainer->backward(loss);
            trainer->step();
          }
        });
      } catch (const std::exception& error) {
        cause = error.what();
      }
      EXPECT_THAT(cause, HasSubstr("the data file has ended"));
      EXPECT_FALSE(soon.passed());
    }
  });
}

}  // namespace
}  // namespace tessera::testing
