// Tests calls that an Engine offers beside backward and step: evaluate, and the checks of the strategy's "check".

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(Evaluate, RanksWithDifferentNumbersOfBatchesGetOneMean) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 2);
    // Rank r evaluates r + 1 batches of its own.
    std::vector<std::int64_t> own;
    const int ranks = scene.is_plain() ? 1 : scene.mesh().world_size();
    for (std::int64_t i = 0; i <= scene.rank(); ++i) own.push_back(i);
    const auto loss_of_batch = [&](std::int64_t i) { return model->forward(batch_of(i).tokens, batch_of(i).targets); };
    if (trainer->engine()) {
      const Engine::Evaluation evaluation = trainer->engine()->evaluate(own, loss_of_batch);
      EXPECT_EQ(evaluation.batches, ranks * (ranks + 1) / 2);
      // Rank i and all ranks after it evaluate batch i.
      double expected = 0;
      for (std::int64_t i = 0; i < ranks; ++i) {
        const at::NoGradGuard no_grad;
        expected += loss_of_batch(i).item<double>() * static_cast<double>(ranks - i);
      }
      EXPECT_NEAR(evaluation.loss, expected / static_cast<double>(evaluation.batches), 1e-6);
    }
    train(scene, *trainer, model, 2, 4);
    scene.note(*trainer, *model);
  });
}

TEST(Evaluate, RankWithoutABatchIsNamedOnAllRanks) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::vector<std::int64_t> own;
    if (scene.rank() + 1 < scene.mesh().world_size()) own.push_back(0);
    const auto loss_of_batch = [&](std::int64_t i) { return model->forward(batch_of(i).tokens, batch_of(i).targets); };
    const std::string last = "rank " + std::to_string(scene.mesh().world_size() - 1);
    scene.refused([&] { trainer->engine()->evaluate(own, loss_of_batch); }, {{"evaluate", last, "no batch"}});
  });
}

TEST(Checks, WriteThroughDataIsAnErrorUnderEveryStrategy) {
  const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
    model->head.data().mul_(0.5);
    train(scene, trainer, model, 1, 2);
  };
  expect_refused(write, {{"head", "written in place", "Gathered"}});
}

TEST(Checks, RawPointerWriteIsRefusedOrFoundByCheckValues) {
  const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
    try {
      model->head.detach().mutable_data_ptr<float>()[0] += 1.0f;
    } catch (const c10::Error& refused) {  // a sharded storage gives no pointer
      EXPECT_NE(std::string(refused.what()).find("Gathered"), std::string::npos);
      model->head.data().mul_(0.5);
    }
    train(scene, trainer, model, 1, 2);
  };
  expect_refused(write, {{"Gathered"}}, {.adjust = [](Strategy& s) { s.check.values = true; }});
}

TEST(Checks, ValueChecksChangeNothing) {
  const auto program = [](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 3);
    trainer->write([&] { model->head.detach().mul_(0.5); });
    train(scene, *trainer, model, 3, 5);
    scene.note(*trainer, *model);
  };
  expect_like_plain(program, {.adjust = [](Strategy& s) {
                      s.check.values = true;
                      s.check.as_across_hosts = true;
                    }});
}

// ---- ranks that share one copy of the parameters, checked as if each had its own copy ----------------------------

/// Trains Tiny for a step and lets rank `at` make `mistake`, on the cells whose ranks share parameters
/// (`check.as_across_hosts`). The next step must be refused with a message that names the mistake.
void expect_found_as_across_hosts(const std::function<void(Tiny&)>& mistake) {
  for (int at : {0, 1, 2}) {
    on_matrix(
        [&](Scene& scene) {
          if (!scene.shares_parameters() || at >= scene.mesh().world_size()) return;
          Tiny model = tiny();
          const auto trainer = scene.trainer(model);
          train(scene, *trainer, model, 0, 1);
          if (scene.rank() == at) mistake(model);
          const std::string other = "on rank " + std::to_string(at == 0 ? 1 : at);
          scene.refused([&] { train(scene, *trainer, model, 1, 2); },
                        {{"different orders", "of unit ", "on rank 0", other}, ExitCode::kInternal});
        },
        {.adjust = [](Strategy& s) { s.check.as_across_hosts = true; }});
  }
}

TEST(Checks, AcrossHostsCheckFindsAForwardOnOneRank) {
  expect_found_as_across_hosts([](Tiny& model) {
    const at::NoGradGuard no_grad;
    (void)model->forward(batch_of(1).tokens, batch_of(1).targets);
  });
}

TEST(Checks, AcrossHostsCheckFindsAUnitUsedOnOneRank) {
  expect_found_as_across_hosts([](Tiny& model) { (void)model->blocks->ptr<BlockImpl>(2)->up->weight.sum(); });
}

TEST(Checks, AcrossHostsCheckFindsAnotherOrderOfUnits) {
  for (int at : {0, 1, 2}) {
    on_matrix(
        [&](Scene& scene) {
          if (!scene.shares_parameters() || at >= scene.mesh().world_size()) return;
          Tiny model = tiny();
          const auto trainer = scene.trainer(model);
          train(scene, *trainer, model, 0, 1);
          // All ranks use all units, but one rank uses the units in another order.
          at::Tensor x = model->embedding(scene.rows(batch_of(1).tokens));
          const std::vector<int> order = scene.rank() == at ? std::vector<int>{1, 0, 2} : std::vector<int>{0, 1, 2};
          for (int block : order) x = model->blocks->ptr<BlockImpl>(static_cast<std::size_t>(block))->forward(x);
          const at::Tensor loss = at::linear(x, model->head).pow(2).mean();
          scene.refused([&] { trainer->backward(loss), trainer->step(); },
                        {{"different orders", "unit blocks.0", "unit blocks.1"}, ExitCode::kInternal});
        },
        {.adjust = [](Strategy& s) { s.check.as_across_hosts = true; }});
  }
}

// A forward on one rank alone does no harm if the ranks share the parameters, and if the check is off.
TEST(Checks, UnitUsedOnOneRankPassesWhereParametersAreShared) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    if (!scene.is_plain() && scene.shares_parameters() && scene.rank() == 1) {
      const at::NoGradGuard no_grad;
      (void)model->forward(batch_of(1).tokens, batch_of(1).targets);
    }
    train(scene, *trainer, model, 1, 3);
    scene.note(*trainer, *model);
  });
}

// Only this check finds a guard that some ranks lack, if the strategy gathers nothing.
// Misuse.GatheredOnOneRankAloneEndsInAnError tests the other strategies.
TEST(Checks, GuardOnSomeRanksIsFoundAtTheStep) {
  on_matrix([](Scene& scene) {
    if (scene.mesh().world_size() == 1 || scene.is_sharded()) return;
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    if (scene.rank() == 0) Gathered(*trainer->engine()).close();
    scene.refused([&] { train(scene, *trainer, model, 1, 2); },
                  {{"a Gathered guard over unit", "on rank 0", "on rank 1"}, ExitCode::kInternal});
  });
}

}  // namespace
}  // namespace tessera::testing
