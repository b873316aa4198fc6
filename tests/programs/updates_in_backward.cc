// Tests programs whose Engines update units while backward runs ("optimizer.in_backward"). Each program gives the
// numbers of plain LibTorch. foreign_gradients.cc has programs with several Engines.

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(UpdateInBackward, TiedFrozenUnusedAndSharedParametersTrain) {
  for (const TinyOptions& options :
       {TinyOptions{}, TinyOptions{.tied_head = true, .frozen_first_block = true}, TinyOptions{.unused_block = true},
        TinyOptions{.shared_block = true}, TinyOptions{.recompute = true}}) {
    expect_like_plain(
        [&](Scene& scene) {
          Tiny model = tiny(options);
          const auto trainer = scene.trainer(model);
          train(scene, *trainer, model, 0, 4);
          scene.note(*trainer, *model);
        },
        {update_in_backward});
  }
}

TEST(UpdateInBackward, EvaluationWritesAndFreezingBetweenStepsCount) {
  expect_like_plain(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 2);
        {
          const torch::NoGradGuard no_grad;
          loss_of(scene, model, 0);
        }
        trainer->write([&] {
          const torch::NoGradGuard no_grad;
          for (at::Tensor& parameter : model->parameters()) parameter.mul_(0.5);
        });
        train(scene, *trainer, model, 2, 4);
        for (at::Tensor& parameter : model->blocks->ptr<BlockImpl>(0)->parameters()) parameter.requires_grad_(false);
        train(scene, *trainer, model, 4, 5);
        for (at::Tensor& parameter : model->blocks->ptr<BlockImpl>(0)->parameters()) parameter.requires_grad_(true);
        train(scene, *trainer, model, 5, 6);
        scene.note(*trainer, *model);
      },
      {update_in_backward});
}

// Some ranks use a unit that another rank does not use. Ranks learn this from the reduction of the unit.
TEST(UpdateInBackward, UnitUsedOnSomeRanksTrainsLikePlainLibTorch) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 5, 5);
        const auto trainer = scene.trainer(model);
        const bool together = scene.is_sharded();  // ranks that gather a unit together also use it together
        for (std::int64_t step = 0; step < 6; ++step) {
          at::Tensor y = model->first(scene.rows(noise(step, 5)));
          const at::Tensor deep = scene.rows(at::arange(12) >= (step % 3 == 2 ? 0 : 6)).nonzero().flatten();
          if (deep.numel() > 0 || together) y = y.index_copy(0, deep, model->second(y.index_select(0, deep)));
          trainer->backward(model->third(y).pow(2).mean());
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units_in_backward});
}

TEST(UpdateInBackward, SuccessiveEnginesKeepValues) {
  expect_like_plain(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 2);
        trainer->renew(nullptr);
        train(scene, *trainer, model, 2, 4);
        trainer->renew([](Strategy& s) { s.optimizer.in_backward = false; });
        train(scene, *trainer, model, 4, 6);
        scene.note(*trainer, *model);
      },
      {update_in_backward});
}

}  // namespace
}  // namespace tessera::testing
