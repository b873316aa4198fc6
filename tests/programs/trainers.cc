// The two ways of training that harness.h declares.

#include <ATen/core/grad_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>

#include "tests/programs/harness.h"

namespace tessera::testing {
namespace {

/// Returns the module's parameters. A tied parameter occurs once, although Module::parameters lists it under each of
/// its names. Frozen parameters are included, since an optimizer ignores parameters without gradients.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : module.parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(found.begin(), found.end(), same)) found.push_back(parameter);
  }
  return found;
}

class PlainTrainer final : public Trainer {
 public:
  PlainTrainer(Scene& scene, std::shared_ptr<torch::nn::Module> module, const Strategy& strategy)
      : scene_(scene), module_(std::move(module)), strategy_(strategy) {
    make_optimizer();
  }

  void backward(const at::Tensor& loss, const MicrobatchInfo& info) override {
    const auto count = static_cast<double>(strategy_.gradient_accumulation);
    loss_ += loss.item<double>() / count;
    (loss / count).backward({}, info.retain_graph);
  }

  void backward_with(const at::Tensor& loss, const std::vector<Trainer*>& others) override {
    backward(loss, {});
    for (Trainer* other : others) static_cast<PlainTrainer*>(other)->loss_ += loss.item<double>();
  }

  void step() override {
    if (narrow()) take_gradients();
    if (strategy_.gradient_clipping > 0) torch::nn::utils::clip_grad_norm_(trained_, strategy_.gradient_clipping);
    optimizer_->step();
    if (narrow()) give_values();
    scene_.note(loss_);
    zero_grad();
  }

  void zero_grad() override {
    loss_ = 0;
    module_->zero_grad();
    optimizer_->zero_grad();
  }
  void read(const Action& action) override { action(); }
  void write(const Action& action) override {
    const at::NoGradGuard no_grad;
    action();
    if (narrow()) masters();
  }
  void renew(const Adjust& adjust) override {
    if (adjust) adjust(strategy_);
    make_optimizer();
  }

 private:
  bool narrow() const { return strategy_.mixed_precision.param != DType::kF32; }

  void make_optimizer() {
    own_ = parameters_of(*module_);
    trained_ = own_;
    if (narrow()) masters();
    const OptimizerConfig& config = strategy_.optimizer;
    optimizer_.emplace(trained_, torch::optim::AdamWOptions(config.lr)
                                     .betas({config.beta1, config.beta2})
                                     .eps(config.eps)
                                     .weight_decay(config.weight_decay));
  }

  /// Makes fp32 masters of 16-bit parameters, as mixed precision needs them.
  void masters() {
    const at::ScalarType type = strategy_.mixed_precision.param == DType::kBF16 ? at::kBFloat16 : at::kHalf;
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const at::Tensor wide = own_[i].detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      trained_[i].is_same(own_[i]) ? void(trained_[i] = wide) : void(trained_[i].copy_(wide));
    }
    module_->to(type);
  }
  void take_gradients() {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      trained_[i].mutable_grad() = own_[i].grad().defined() ? own_[i].grad().to(at::kFloat) : at::Tensor();
    }
  }
  void give_values() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < own_.size(); ++i) own_[i].copy_(trained_[i]);
  }

  Scene& scene_;
  std::shared_ptr<torch::nn::Module> module_;
  Strategy strategy_;
  std::vector<at::Tensor> own_, trained_;
  std::optional<torch::optim::AdamW> optimizer_;
  double loss_ = 0;
};

class EngineTrainer final : public Trainer {
 public:
  EngineTrainer(Scene& scene, std::shared_ptr<torch::nn::Module> module, const Strategy& strategy)
      : scene_(scene), module_(std::move(module)), strategy_(strategy) {
    engine_.emplace(module_, strategy_, scene_.mesh());
  }

  void backward(const at::Tensor& loss, const MicrobatchInfo& info) override { engine_->backward(loss, info); }
  void backward_with(const at::Tensor& loss, const std::vector<Trainer*>& others) override {
    std::vector<Engine*> engines = {engine()};
    for (Trainer* other : others) engines.push_back(other->engine());
    tessera::backward(loss, engines);
  }
  void step() override { scene_.note(engine_->step().loss); }
  void zero_grad() override { engine_->zero_grad(); }
  void read(const Action& action) override {
    Gathered guard(*engine_);
    action();
    guard.close();
  }
  void write(const Action& action) override {
    Gathered guard(*engine_, Gathered::kWrite);
    {
      const at::NoGradGuard no_grad;
      action();
    }
    guard.close();
  }
  void renew(const Adjust& adjust) override {
    engine_.reset();
    if (adjust) adjust(strategy_);
    engine_.emplace(module_, strategy_, scene_.mesh());
  }
  Engine* engine() override { return &*engine_; }

 private:
  Scene& scene_;
  std::shared_ptr<torch::nn::Module> module_;
  Strategy strategy_;
  std::optional<Engine> engine_;
};

}  // namespace

std::unique_ptr<Trainer> Scene::trainer(std::shared_ptr<torch::nn::Module> module, const Adjust& adjust) {
  Strategy strategy = strategy_;
  if (adjust) adjust(strategy);
  if (is_plain()) return std::make_unique<PlainTrainer>(*this, std::move(module), strategy);
  return std::make_unique<EngineTrainer>(*this, std::move(module), strategy);
}

}  // namespace tessera::testing
