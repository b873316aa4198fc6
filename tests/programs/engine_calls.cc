// What an Engine offers beside backward and step: set_trainable, evaluate, and the checks of "check".

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/programs/harness.h"

namespace tessera::testing {
namespace {

constexpr double kShort = 3;  // seconds

void train(Scene& scene, Trainer& trainer, Tiny& model, std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = begin; step < end; ++step) {
    trainer.backward(loss_of(scene, model, step));
    trainer.step();
  }
}

/// On the Engine where there is one, else what the call stands for.
void set_trainable(Trainer& trainer, Tiny& model, const std::string& pattern, const std::string& prefix,
                   bool trainable) {
  if (trainer.engine()) return trainer.engine()->set_trainable(pattern, trainable);
  for (auto& item : model->named_parameters()) {
    if (item.key().rfind(prefix, 0) == 0) item.value().requires_grad_(trainable);
  }
}

TEST(SetTrainable, WhatWasFrozenTrainsFromThenOnAndTheOthersGoOn) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny({.frozen_first_block = true});
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 3);
    set_trainable(*trainer, model, "blocks.0.*", "blocks.0.", true);
    train(scene, *trainer, model, 3, 6);
    set_trainable(*trainer, model, "embedding.*", "embedding.", false);
    train(scene, *trainer, model, 6, 8);
    scene.note(*trainer, *model);
  });
}

/// A block that nobody uses is frozen and unfrozen; whatever is carried over must not have changed a bit.
Values trained(const Mesh& mesh, const Placed& placed, StateDType states, DType dtype, bool replans) {
  Strategy strategy = strategy_for(placed, nullptr, dtype);
  strategy.optimizer.state_dtype = states;
  Session session(mesh, strategy, {.unused_block = true});
  for (std::size_t i = 0; i < 6; ++i) {
    session.train(i);
    if (!replans || i % 2 == 1) continue;
    const std::size_t unused = session.model->blocks->size() - 1;
    session.engine.set_trainable("blocks." + std::to_string(unused) + ".*", i % 4 != 0);
  }
  return session.values();
}

TEST(SetTrainable, CarriesStatesMastersAndCountsToTheBit) {
  for (const StateDType states : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Placed& placed : kOnePerPlacement) {
        SCOPED_TRACE(name_of(placed) + ", " + name_of(states) + " states, " + std::string(name_of(dtype)));
        run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
          const Values plain = trained(mesh, placed, states, dtype, false);
          EXPECT_TRUE(all_same_bits(trained(mesh, placed, states, dtype, true), plain));
        });
      }
    }
  }
}

TEST(SetTrainable, RefusesPatternsThatMatchNothingAndCallsInMidStep) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        trainer->backward(loss_of(scene, model, 0));
        scene.refused([&] { trainer->engine()->set_trainable("head", false); }, {{"set_trainable", "step()"}});
        trainer->step();
        scene.refused([&] { trainer->engine()->set_trainable("haed", false); },
                      {{"haed", "matches no parameter", "head"}});
      },
      {.timeout_s = kShort});
}

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
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        scene.refused(
            [&] {
              model->head.data().mul_(0.5);
              train(scene, *trainer, model, 1, 2);
            },
            {{"written through .data()", "Gathered"}});
      },
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
