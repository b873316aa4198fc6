// Programs that write parameters, or give them other memory.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(Parameters, ConversionIsNoticed) {
  expect_noticed([](Tiny& model) { model->to(at::kDouble); }, {{"was given other memory", "Module::to"}});
}

TEST(Parameters, OtherDataIsNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "was given other memory", "Gathered"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight; };
  expect_noticed([&](Tiny& model) { weight_of(model).set_data(at::ones({31, 12})); }, wanted);
  expect_noticed(
      [&](Tiny& model) {
        const at::NoGradGuard no_grad;
        weight_of(model).set_(at::ones({31, 12}));
      },
      wanted);
}

TEST(Parameters, OtherDataUnderAGuardIsTakenIn) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 2);
    trainer->write([&] {
      model->blocks->ptr<BlockImpl>(0)->up->weight.set_data(at::full({31, 12}, 0.03));
      model->blocks->ptr<BlockImpl>(2)->down->weight.set_(at::full({31, 12}, 0.02).t());
      model->head.set_data(model->head.detach().t().contiguous().t() * 0.5);
    });
    train(scene, *trainer, model, 2, 4);
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, WritesInPlaceOutsideGatheredAreNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "written in place", "Gathered::kWrite"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight; };
  const auto mul = [&](Tiny& model) {
    const at::NoGradGuard no_grad;
    weight_of(model).mul_(0.5);
  };
  expect_noticed(mul, wanted);
  expect_noticed([&](Tiny& model) { torch::nn::init::normal_(weight_of(model)); }, wanted);
  const auto through_view = [&](Tiny& model) {
    const at::NoGradGuard no_grad;
    weight_of(model).narrow(0, 3, 4).zero_();
  };
  expect_noticed(through_view, wanted);
  expect_noticed([&](Tiny& model) { weight_of(model).detach().clamp_(-0.01, 0.01); }, wanted);
}

TEST(Parameters, WriteBetweenBackwardAndStepIsNoticed) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        trainer->backward(loss_of(scene, model, 1));
        {
          const at::NoGradGuard no_grad;
          model->head.mul_(0.5);
        }
        scene.refused([&] { trainer->step(); }, {{"head", "written in place", "kWrite"}});
      },
      {.timeout_s = kShort});
}

TEST(Parameters, WriteOutsideAGuardOfSomeUnitsIsNoticed) {
  const Mistake write = [](Scene& scene, Trainer& trainer, Tiny& model) {
    Gathered guard(*trainer.engine(), {model->blocks->ptr<BlockImpl>(1)->up->weight}, Gathered::kWrite);
    {
      const at::NoGradGuard no_grad;
      model->blocks->ptr<BlockImpl>(1)->up->weight.mul_(0.5);
      model->blocks->ptr<BlockImpl>(2)->up->weight.mul_(0.5);
    }
    guard.close();
    trainer.backward(loss_of(scene, model, 1));
  };
  expect_refused(write, {{"blocks.2.up.weight", "written in place", "kWrite"}});
}

TEST(Parameters, WeightClippingAndDecayByHandUnderGathered) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    for (std::int64_t step = 0; step < 4; ++step) {
      train(scene, *trainer, model, step, step + 1);
      trainer->write([&] {
        for (at::Tensor& parameter : model->parameters()) parameter.clamp_(-0.3, 0.3);
        model->head.detach().mul_(0.9);
        model->embedding->weight.copy_(model->embedding->weight * 0.5 + model->head * 0.5);
      });
    }
    scene.note(*trainer, *model);
  });
}

// An exponential mean of the weights, swapped in for an evaluation and out again.
TEST(Parameters, MeanOfWeightsSwappedInAndOut) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::vector<at::Tensor> mean;
    const auto parameters = model->parameters();
    trainer->read([&] {
      for (const at::Tensor& parameter : parameters) mean.push_back(parameter.detach().clone());
    });
    const auto swap = [&] {
      trainer->write([&] {
        for (std::size_t i = 0; i < mean.size(); ++i) {
          const at::Tensor own = parameters[i].detach().clone();
          parameters[i].detach().copy_(mean[i]);
          mean[i] = own;
        }
      });
    };
    for (std::int64_t step = 0; step < 3; ++step) {
      train(scene, *trainer, model, step, step + 1);
      trainer->read([&] {
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i].lerp_(parameters[i].detach(), 0.5);
      });
      swap();
      const at::NoGradGuard no_grad;
      scene.note(model->forward(batch_of(5).tokens, batch_of(5).targets).item<double>());
      swap();
    }
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, EmbeddingThatWritesInForwardIsRefusedByName) {
  struct Normed : torch::nn::Module {
    Normed() {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(19, 6).max_norm(1.0)));
      out = register_module("out", torch::nn::Linear(6, 3));
    }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear out{nullptr};
  };
  on_matrix(
      [](Scene& scene) {
        const auto model = seeded([] { return std::make_shared<Normed>(); });
        scene.refused([&] { scene.trainer(model); }, {{"table", "max_norm", "hint"}});
      },
      {.adjust = linear_units, .timeout_s = kShort});
}

}  // namespace
}  // namespace tessera::testing
