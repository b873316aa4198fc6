// Tests backwards that do not belong to the Engine of a module. They are calls of another Engine, backwards that a
// program runs by hand, or backwards in code that is left over from plain LibTorch.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <string>

#include "runtime/base/log.h"
#include "tests/programs/models.h"
#include "tests/support/stderr_of.h"

namespace tessera::testing {
namespace {

/// A generative adversarial network that consists of two small networks.
struct Gan {
  explicit Gan(Scene& scene)
      : scene(scene),
        generator(mlp(3, 7, 2)),
        critic(mlp(2, 9, 1)),
        of_generator(scene.trainer(generator)),
        of_critic(scene.trainer(critic)) {}

  void train_critic(std::int64_t step) {
    // PyTorch's example clears gradients here. The Engine has already dropped the gradients that the backward of the
    // generator left.
    if (scene.is_plain()) of_critic->zero_grad();
    const at::Tensor real = critic->forward(scene.rows(noise(step + 100, 2)));
    const at::Tensor fake = critic->forward(generator->forward(scene.rows(noise(step, 3))).detach());
    of_critic->backward(at::softplus(-real).mean() + at::softplus(fake).mean());
    of_critic->step();
  }
  void train_generator(std::int64_t step) {
    of_generator->backward(at::softplus(-critic->forward(generator->forward(scene.rows(noise(step, 3))))).mean());
    of_generator->step();
  }
  void note() {
    scene.note(*of_generator, *generator);
    scene.note(*of_critic, *critic);
  }

  Scene& scene;
  Mlp generator, critic;
  std::unique_ptr<Trainer> of_generator, of_critic;
};

void train_gan(Scene& scene) {
  Gan gan(scene);
  for (std::int64_t step = 0; step < 4; ++step) gan.train_critic(step), gan.train_generator(step);
  gan.note();
}

TEST(ForeignGradients, GanTrainsLikePlainLibTorch) {
  for (const auto adjust : {linear_units, linear_units_in_backward}) expect_like_plain(train_gan, {adjust});
}

// The backward of the generator runs while the critic already has gradients of this step.
TEST(ForeignGradients, GeneratorTrainsInsideTheCriticsStep) {
  expect_like_plain(
      [](Scene& scene) {
        Gan gan(scene);
        for (std::int64_t step = 0; step < 3; ++step) {
          const at::Tensor fake = gan.generator->forward(scene.rows(noise(step, 3)));
          const at::Tensor real = gan.critic->forward(scene.rows(noise(step + 100, 2)));
          gan.of_critic->backward(at::softplus(-real).mean() + at::softplus(gan.critic->forward(fake.detach())).mean());
          std::vector<at::Tensor> kept;  // without an Engine, the program itself must store these gradients
          if (scene.is_plain()) {
            for (at::Tensor& parameter : gan.critic->parameters()) kept.push_back(parameter.grad().clone());
          }
          gan.of_generator->backward(at::softplus(-gan.critic->forward(fake)).mean());
          if (scene.is_plain()) {
            auto parameters = gan.critic->parameters();
            for (std::size_t i = 0; i < kept.size(); ++i) parameters[i].mutable_grad() = kept[i];
          }
          gan.of_critic->step();
          gan.of_generator->step();
        }
        gan.note();
      },
      {linear_units});
}

void train_autoencoder(Scene& scene) {
  Mlp encoder = mlp(3, 7, 4), decoder = mlp(4, 9, 3);
  const auto of_encoder = scene.trainer(encoder), of_decoder = scene.trainer(decoder);
  for (std::int64_t step = 0; step < 4; ++step) {
    const at::Tensor x = scene.rows(noise(step, 3));
    of_encoder->backward_with((decoder->forward(encoder->forward(x)) - x).pow(2).mean(), {of_decoder.get()});
    of_decoder->step();
    of_encoder->step();
  }
  scene.note(*of_encoder, *encoder);
  scene.note(*of_decoder, *decoder);
}

TEST(ForeignGradients, OneLossTrainsTwoEngines) {
  for (const auto adjust : {linear_units, linear_units_in_backward}) expect_like_plain(train_autoencoder, {adjust});
}

// Each Engine gets gradients under its own loss scale, whichever Engine comes first.
TEST(ForeignGradients, OneLossTrainsEnginesOfDifferentLossScales) {
  for (bool half_first : {false, true}) {
    const Adjust half = [](Strategy& s) {
      s.mixed_precision.param = DType::kF16;
      s.mixed_precision.loss_scale.initial = 4096;
    };
    expect_like_plain(
        [&](Scene& scene) {
          Mlp encoder = mlp(3, 7, 4), decoder = mlp(4, 9, 3);
          const auto of_encoder = scene.trainer(encoder, half), of_decoder = scene.trainer(decoder);
          for (std::int64_t step = 0; step < 3; ++step) {
            const at::Tensor x = scene.rows(noise(step, 3));
            const at::Tensor code = encoder->forward(x.to(at::kHalf)).to(at::kFloat);
            const at::Tensor loss = (decoder->forward(code) - x).pow(2).mean();
            (half_first ? of_encoder : of_decoder)->backward_with(loss, {(half_first ? of_decoder : of_encoder).get()});
            of_decoder->step();
            of_encoder->step();
          }
          if (!scene.is_plain()) {
            EXPECT_EQ(of_encoder->engine()->steps_applied(), 3);
          }
          scene.note(*of_encoder, *encoder);
          scene.note(*of_decoder, *decoder);
        },
        {.adjust = linear_units, .tolerance = 1e-3, .loss_tolerance = 1e-3});
  }
}

TEST(ForeignGradients, SameEngineGivenTwiceIsRefusedAndHarmless) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(3, 7, 4);
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 2; ++step) {
          const at::Tensor loss = loss_of(scene, model, step);
          scene.refused([&] { tessera::backward(loss, {trainer->engine(), trainer->engine()}); }, {{"twice", "hint"}});
          scene.refused([&] { tessera::backward(loss, {trainer->engine(), nullptr}); }, {{"null"}});
          trainer->backward(loss);
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

/// Runs a backward by hand for the sum of the squared outputs. Returns the sum of the magnitudes of the input's
/// gradient.
double saliency(Mlp& model, const at::Tensor& input) {
  const at::Tensor x = input.clone().requires_grad_();
  model->forward(x).pow(2).sum().backward();
  return x.grad().abs().sum().item<double>();
}

TEST(ForeignGradients, SaliencyMapBetweenStepsDisturbsNothing) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        scene.note(saliency(model, noise(7, 5)));
        model->zero_grad();
        for (std::int64_t step = 0; step < 4; ++step) {
          train(scene, *trainer, model, step, step + 1);
          scene.note(saliency(model, noise(7, 5)));
          scene.note(saliency(model, noise(8, 5)));
          if (scene.is_plain() || step % 2 == 0) model->zero_grad();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

TEST(ForeignGradients, SaliencyMapBetweenBackwardAndStepDisturbsNothing) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 4; ++step) {
          trainer->backward(loss_of(scene, model, step));
          const at::Tensor x = noise(7, 5).requires_grad_();
          const at::Tensor sum = model->forward(x).sum();
          scene.note(torch::autograd::grad({sum}, {x})[0].abs().sum().item<double>());
          // The program also asks for gradients with respect to parameters. The .grad of these parameters does not
          // change.
          const at::Tensor again = model->forward(x).sum();
          const auto slopes = torch::autograd::grad({again}, {model->second->weight, model->third->bias});
          scene.note(slopes[0].abs().sum().item<double>());
          scene.note(slopes[1].abs().sum().item<double>());
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

// A backward by hand runs in the middle of a step. Plain LibTorch would add the gradients of this backward. The Engine
// uses only the gradients of its own backward.
TEST(ForeignGradients, ManualBackwardInMidStepIsDropped) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model, [](Strategy& s) { s.gradient_accumulation = 2; });
        for (std::int64_t step = 0; step < 3; ++step) {
          for (std::int64_t m = 0; m < 2; ++m) {
            trainer->backward(loss_of(scene, model, step, m, 2));
            if (!scene.is_plain()) saliency(model, noise(7, 5));
          }
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

// ---- gradients that are cleared ----------------------------------------------------------------------------------

TEST(ForeignGradients, ZeroGradDropsStartedMicrobatches) {
  for (GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
    const Adjust adjust = [&](Strategy& s) {
      linear_units(s);
      s.gradient_accumulation = 2;
      s.gradient_sync = sync;
    };
    expect_like_plain(
        [](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          const auto trainer = scene.trainer(model);
          const auto microbatch = [&](std::int64_t step, std::int64_t m) {
            trainer->backward(loss_of(scene, model, step, m, 2));
          };
          for (std::int64_t step = 0; step < 4; ++step) {
            if (step > 0) microbatch(step + 10, 0);
            if (step == 2) microbatch(step + 10, 1);
            trainer->zero_grad();
            if (!scene.is_plain()) {
              EXPECT_FALSE(trainer->engine()->step_is_due());
            }
            microbatch(step, 0), microbatch(step, 1);
            trainer->step();
          }
          scene.note(*trainer, *model);
        },
        {adjust});
  }
}

TEST(ForeignGradients, GradientsClearedBeforeStepAreNoticed) {
  on_matrix(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        model->zero_grad();  // this call between steps has no effect
        train(scene, *trainer, model, 1, 2);
        trainer->backward(loss_of(scene, model, 2));
        model->zero_grad();
        scene.refused([&] { trainer->step(); }, {{"first.weight", "cleared", "engine.zero_grad()"}});
      },
      {.adjust = linear_units});
}

// ---- code left over from plain LibTorch --------------------------------------------------------------------------

template <class Optimizer, class Options>
void expect_optimizer_is_refused(const Options& options, bool by_hand) {
  on_matrix(
      [&](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        Optimizer optimizer(model->parameters(), options);
        const at::Tensor loss = loss_of(scene, model, 0);
        optimizer.zero_grad();
        by_hand ? loss.backward() : trainer->backward(loss);
        scene.refused([&] { optimizer.step(); }, {{"the gradient of", "engine.step()"}, std::nullopt});
      },
      {.adjust = linear_units});
}

TEST(ForeignGradients, OptimizersOfLibTorchAreRefused) {
  for (bool by_hand : {true, false}) {
    expect_optimizer_is_refused<torch::optim::SGD>(torch::optim::SGDOptions(0.1), by_hand);
    expect_optimizer_is_refused<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1), by_hand);
  }
}

TEST(ForeignGradients, ClippingByLibTorchIsRefused) {
  for (bool by_hand : {true, false}) {
    on_matrix(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          const auto trainer = scene.trainer(model);
          const at::Tensor loss = loss_of(scene, model, 0);
          by_hand ? loss.backward() : trainer->backward(loss);
          const std::string remedy = by_hand ? "engine.backward(loss)" : "gradient_clipping";
          scene.refused([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0); },
                        {{"the gradient of", remedy}, std::nullopt});
          scene.refused([&] { torch::nn::utils::clip_grad_value_(model->parameters(), 1.0); },
                        {{"the gradient of", remedy}, std::nullopt});
          scene.refused([&] { model->first->weight.mutable_grad().zero_(); },
                        {{"the gradient of first.weight", remedy}, std::nullopt});
        },
        {.adjust = linear_units});
  }
}

// ---- warnings ----------------------------------------------------------------------------------------------------

/// Returns the number of warnings that `program` gets on `cell` because gradients of a backward by hand are dropped.
std::size_t warnings_of(const Cell& cell, const Program& program) {
  const std::string log = stderr_of([&] {
    set_log_level(LogLevel::kWarning);
    on_cell(cell, program, {.adjust = linear_units});
  });
  const std::string warning = "a backward that is not the Engine's made a gradient of ";
  std::size_t count = 0;
  for (auto at = log.find(warning); at != std::string::npos; at = log.find(warning, at + 1)) ++count;
  return count;
}

// The program is a plain LibTorch loop around a module that an Engine trains.
TEST(ForeignGradients, ManualBackwardAndOptimizerWarnOncePerRank) {
  const auto program = [](Scene& scene) {
    Mlp model = mlp(5, 9, 3);
    const auto trainer = scene.trainer(model);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    for (std::int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(scene, model, step).backward();
      scene.refused([&] { optimizer.step(); }, {{"the gradient of", "engine.backward(loss)"}, std::nullopt});
    }
  };
  for_each_cell([&](const Cell& cell) { EXPECT_EQ(warnings_of(cell, program), cell.ranks); });
}

TEST(ForeignGradients, EnginesOwnBackwardGivesNoWarning) {
  for_each_cell([](const Cell& cell) { EXPECT_EQ(warnings_of(cell, train_gan), 0); });
}

}  // namespace
}  // namespace tessera::testing
