// What an Engine offers beside backward and step: evaluate, and the checks of "check".

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(Evaluate, RanksWithDifferentNumbersOfBatches) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 2);
    // Rank r evaluates r + 1 batches.
    std::vector<std::int64_t> own;
    const int ranks = scene.is_plain() ? 1 : scene.mesh().world_size();
    for (std::int64_t i = 0; i <= scene.rank(); ++i) own.push_back(i);
    const auto loss_of_batch = [&](std::int64_t i) { return model->forward(batch_of(i).tokens, batch_of(i).targets); };
    if (trainer->engine()) {
      const Engine::Evaluation evaluation = trainer->engine()->evaluate(own, loss_of_batch);
      EXPECT_EQ(evaluation.batches, ranks * (ranks + 1) / 2);
      // Batch i is evaluated by all ranks from i on.
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

TEST(Evaluate, ARankWithoutABatchIsNamedOnAllRanks) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        std::vector<std::int64_t> own;
        if (scene.rank() + 1 < scene.mesh().world_size()) own.push_back(0);
        const auto loss_of_batch = [&](std::int64_t i) {
          return model->forward(batch_of(i).tokens, batch_of(i).targets);
        };
        const std::string last = "rank " + std::to_string(scene.mesh().world_size() - 1);
        scene.refused([&] { trainer->engine()->evaluate(own, loss_of_batch); }, {{"evaluate", last, "no batch"}});
      },
      {.timeout_s = kShort});
}

TEST(Checks, WriteThroughDataIsFoundUnderCheckValues) {
  const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
    model->head.data().mul_(0.5);
    train(scene, trainer, model, 1, 2);
  };
  expect_refused(write, {{"written through .data()", "Gathered"}},
                 {.adjust = [](Strategy& s) { s.check.values = true; }, .timeout_s = kShort});
}

TEST(Checks, ChecksOfValuesChangeNothing) {
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

TEST(Checks, AsAcrossHostsFindsAForwardOnOneRank) {
  Strategy strategy = strategy_for(Placed(ShardingStrategy::kFullShard, /*shared=*/true));
  strategy.check.as_across_hosts = true;
  run_ranks({.ranks = 2, .timeout_s = kShort}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    session.train(0);
    if (mesh.rank() == 0) {
      const at::NoGradGuard no_grad;
      session.loss(1);
    }
    try {
      session.train(1);
      ADD_FAILURE() << "nothing was found";
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("different orders"), std::string::npos) << error.message();
    }
  });
}

TEST(Checks, GatheredOnSomeRanksOnlyIsFoundAtTheStep) {
  for (const Placed& placed : {Placed(ShardingStrategy::kFullShard, /*shared=*/true),
                               Placed(ShardingStrategy::kNoShard), Placed(ShardingStrategy::kShardGradients)}) {
    SCOPED_TRACE(name_of(placed));
    run_ranks({.ranks = 2, .timeout_s = kShort}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(placed));
      session.train(0);
      if (mesh.rank() == 0) const Gathered guard(session.engine);
      try {
        session.train(1);
        ADD_FAILURE() << "nothing was found";
      } catch (const Error& error) {
        EXPECT_NE(error.message().find("a Gathered guard over unit"), std::string::npos) << error.message();
      }
    });
  }
}

}  // namespace
}  // namespace tessera::testing
