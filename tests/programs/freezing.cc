// Tests parameters that begin to train, and parameters that stop training.

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(Training, ParametersFrozenForAWhileTrainLikePlainLibTorch) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    const auto set = [&](bool trains) {
      for (at::Tensor& parameter : model->blocks[1]->parameters()) parameter.requires_grad_(trains);
      model->head.requires_grad_(trains);
    };
    train(scene, *trainer, model, 0, 2);
    set(false);
    train(scene, *trainer, model, 2, 4);
    set(true);
    train(scene, *trainer, model, 4, 6);
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, ManualUnfreezingIsNoticed) {
  const auto unfreeze = [](Tiny& model) {
    for (at::Tensor& parameter : model->blocks[0]->parameters()) parameter.requires_grad_(true);
  };
  expect_noticed(unfreeze, {{"blocks.0.", "frozen", "set_trainable"}}, {.frozen_first_block = true});
}

/// Calls the Engine's set_trainable if there is an Engine, and otherwise does the same by hand.
void set_trainable(Trainer& trainer, Tiny& model, const std::string& pattern, const std::string& prefix,
                   bool trainable) {
  if (trainer.engine()) return trainer.engine()->set_trainable(pattern, trainable);
  for (auto& item : model->named_parameters()) {
    if (item.key().rfind(prefix, 0) == 0) item.value().requires_grad_(trainable);
  }
}

TEST(SetTrainable, UnfrozenParametersTrainAndTheOthersGoOn) {
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

TEST(SetTrainable, ReunfrozenParametersKeepTheirStates) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    const auto set = [&](const std::string& prefix, bool trainable) {
      set_trainable(*trainer, model, prefix + "*", prefix, trainable);
    };
    train(scene, *trainer, model, 0, 3);
    set("blocks.1.", false);
    train(scene, *trainer, model, 3, 4);
    set("embedding.", false);
    train(scene, *trainer, model, 4, 6);
    set("blocks.1.", true);
    train(scene, *trainer, model, 6, 7);
    set("embedding.", true);
    train(scene, *trainer, model, 7, 10);
    scene.note(*trainer, *model);
  });
}

/// Trains for six steps. If `replans` is true, an unused block is frozen and unfrozen between steps, and a block that
/// trains is frozen and unfrozen again at once. Every bit of state that is carried over must stay the same.
Values trained(const Mesh& mesh, const Placed& placed, StateDType states, DType dtype, bool replans) {
  Strategy strategy = strategy_for(placed, nullptr, dtype);
  strategy.optimizer.state_dtype = states;
  Session session(mesh, strategy, {.unused_block = true});
  for (std::size_t i = 0; i < 6; ++i) {
    session.train(i);
    if (replans && i == 3) {
      session.engine.set_trainable("blocks.0.*", false);
      session.engine.set_trainable("blocks.0.*", true);
    }
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
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    trainer->backward(loss_of(scene, model, 0));
    scene.refused([&] { trainer->engine()->set_trainable("head", false); }, {{"set_trainable", "step()"}});
    trainer->step();
    scene.refused([&] { trainer->engine()->set_trainable("haed", false); }, {{"haed", "matches no parameter", "head"}});
  });
}

}  // namespace
}  // namespace tessera::testing
