#include "tests/programs/models.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>

namespace tessera::testing {

std::unique_lock<std::mutex> lock_generator() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

MlpImpl::MlpImpl(std::int64_t in, std::int64_t hidden, std::int64_t out) {
  first = register_module("first", torch::nn::Linear(in, hidden));
  second = register_module("second", torch::nn::Linear(hidden, hidden));
  third = register_module("third", torch::nn::Linear(hidden, out));
}

at::Tensor MlpImpl::forward(const at::Tensor& x) { return third(at::tanh(second(at::tanh(first(x))))); }

Mlp mlp(std::int64_t in, std::int64_t hidden, std::int64_t out) {
  return seeded([&] { return Mlp(in, hidden, out); });
}

void linear_units(Strategy& strategy) { strategy.units.classes = {"Linear"}; }

void linear_units_in_backward(Strategy& strategy) {
  linear_units(strategy);
  update_in_backward(strategy);
}

at::Tensor noise(std::int64_t step, std::int64_t width) {
  const at::Tensor ramp = at::arange(12 * width, at::kFloat).reshape({12, width});
  return at::sin(ramp * 1.7 + static_cast<double>(step) * 3.1);
}

Tiny tiny(const TinyOptions& options, bool deferred) {
  const auto lock = lock_generator();
  return make_tiny(options, deferred);
}

const Batch& batch_of(std::int64_t step) {
  static const std::vector<Batch> batches = make_batches(6, 12, 5, 19);
  return batches[static_cast<std::size_t>(step) % batches.size()];
}

at::Tensor loss_of(Scene& scene, Tiny& model, std::int64_t step, std::int64_t index, std::int64_t count) {
  const Batch& batch = batch_of(step);
  return model->forward(scene.rows(batch.tokens, index, count), scene.rows(batch.targets, index, count));
}

at::Tensor loss_of(Scene& scene, Mlp& model, std::int64_t step, std::int64_t index, std::int64_t count) {
  const at::Tensor x = noise(step, model->first->options.in_features());
  return model->forward(scene.rows(x, index, count)).pow(2).mean();
}

void expect_refused(const Mistake& mistake, const Refusal& wanted, const ProgramOptions& options,
                    const TinyOptions& model_options) {
  on_matrix(
      [&](Scene& scene) {
        Tiny model = tiny(model_options);
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        scene.refused([&] { mistake(scene, *trainer, model); }, wanted);
      },
      options);
}

void expect_noticed(const std::function<void(Tiny&)>& change, const Refusal& wanted, const TinyOptions& model_options) {
  const Mistake mistake = [&](Scene& scene, Trainer& trainer, Tiny& model) {
    change(model);
    trainer.backward(loss_of(scene, model, 1));
  };
  expect_refused(mistake, wanted, {}, model_options);
}

}  // namespace tessera::testing
