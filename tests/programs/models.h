#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <functional>
#include <mutex>

#include "tests/programs/harness.h"

namespace tessera::testing {

/// Locks LibTorch's generator. Ranks are threads, so they share it.
std::unique_lock<std::mutex> lock_generator();

/// Returns the object that `make` makes after a fixed seed is set.
template <class Make>
auto seeded(const Make& make) {
  const auto lock = lock_generator();
  torch::manual_seed(1234);
  return make();
}

/// A network of three layers. Each layer is a unit under `linear_units`.
struct MlpImpl : torch::nn::Module {
  MlpImpl(std::int64_t in, std::int64_t hidden, std::int64_t out);
  at::Tensor forward(const at::Tensor& x);
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(Mlp);
Mlp mlp(std::int64_t in, std::int64_t hidden, std::int64_t out);
void linear_units(Strategy& strategy);
void linear_units_in_backward(Strategy& strategy);  ///< sets linear_units, and updates in backward
/// Returns twelve rows of `width` numbers. Equal steps have equal numbers.
at::Tensor noise(std::int64_t step, std::int64_t width);

/// Returns Tiny, made immediately or deferred.
Tiny tiny(const TinyOptions& options = {}, bool deferred = false);

/// Returns one of six batches of text. Each batch has 12 rows, so one, two or three ranks can divide it evenly, even
/// into two microbatches each.
const Batch& batch_of(std::int64_t step);

/// Divides batch `step` into `count` microbatches. Returns the loss of this scene's rows of microbatch `index`. Mlp's
/// loss is the mean square of its outputs for random inputs.
at::Tensor loss_of(Scene& scene, Tiny& model, std::int64_t step, std::int64_t index = 0, std::int64_t count = 1);
at::Tensor loss_of(Scene& scene, Mlp& model, std::int64_t step, std::int64_t index = 0, std::int64_t count = 1);

/// Trains the steps from `begin` to `end`, with one microbatch each.
template <class Model>
void train(Scene& scene, Trainer& trainer, Model& model, std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = begin; step < end; ++step) {
    trainer.backward(loss_of(scene, model, step));
    trainer.step();
  }
}

/// A mistake that a program makes while it trains Tiny. It must be refused.
using Mistake = std::function<void(Scene&, Trainer&, Tiny&)>;
/// Trains Tiny for a step on every cell, and checks that `mistake` is then refused.
void expect_refused(const Mistake& mistake, const Refusal& wanted, const ProgramOptions& options = {},
                    const TinyOptions& model = {});
/// Trains Tiny for a step on every cell, and checks that `change`, or else the backward after it, is refused.
void expect_noticed(const std::function<void(Tiny&)>& change, const Refusal& wanted, const TinyOptions& model = {});

}  // namespace tessera::testing
