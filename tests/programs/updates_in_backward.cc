// Programs whose Engines update units while backward runs ("optimizer.in_backward"). Each gives plain LibTorch's numbers.

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

void in_backward(Strategy& strategy) {
  strategy.gradient_clipping = 0;
  strategy.optimizer.in_backward = true;
}
void linear_units_in_backward(Strategy& strategy) {
  linear_units(strategy);
  in_backward(strategy);
}

TEST(UpdateInBackward, AllKindsOfParameters) {
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
        {in_backward});
  }
}

TEST(UpdateInBackward, Gan) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp generator = mlp(3, 7, 2), critic = mlp(2, 9, 1);
        const auto of_generator = scene.trainer(generator), of_critic = scene.trainer(critic);
        for (std::int64_t step = 0; step < 4; ++step) {
          if (scene.is_plain()) of_critic->zero_grad();
          const at::Tensor real = critic->forward(scene.rows(noise(step + 100, 2)));
          const at::Tensor fake = critic->forward(generator->forward(scene.rows(noise(step, 3))).detach());
          of_critic->backward(at::softplus(-real).mean() + at::softplus(fake).mean());
          of_critic->step();
          const at::Tensor faked = critic->forward(generator->forward(scene.rows(noise(step, 3))));
          of_generator->backward(at::softplus(-faked).mean());
          of_generator->step();
        }
        scene.note(*of_generator, *generator);
        scene.note(*of_critic, *critic);
      },
      {linear_units_in_backward});
}

TEST(UpdateInBackward, OneLossTrainsTwoEngines) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp a = mlp(3, 7, 2), b = mlp(2, 9, 1);
        const auto of_a = scene.trainer(a), of_b = scene.trainer(b);
        for (std::int64_t step = 0; step < 4; ++step) {
          of_a->backward_with(b->forward(a->forward(scene.rows(noise(step, 3)))).pow(2).mean(), {of_b.get()});
          of_a->step();
          of_b->step();
        }
        scene.note(*of_a, *a);
        scene.note(*of_b, *b);
      },
      {linear_units_in_backward});
}

TEST(UpdateInBackward, EvaluatesWritesAndFreezesBetweenSteps) {
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
      {in_backward});
}

// A unit that a rank does not use, while others do: what ranks tell each other with the unit's reduction.
TEST(UpdateInBackward, UnitsUsedOnSomeRanksOnly) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 5, 5);
        const auto trainer = scene.trainer(model);
        const bool together = scene.is_sharded();  // ranks that gather a unit together use it together
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

TEST(UpdateInBackward, EnginesInSuccessionKeepValues) {
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
      {in_backward});
}

}  // namespace
}  // namespace tessera::testing
