#include "tests/programs/harness.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "runtime/base/status.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {
namespace {

/// AdamW divides by the root of the second moment. With LibTorch's eps of 1e-8 a difference in a gradient's last bit
/// becomes any difference in the parameter where the gradient is nearly zero; this eps keeps both runs comparable.
constexpr double kEps = 1e-2;

/// The module's parameters, a tied one once, though Module::parameters lists it under each of its names. Frozen ones are
/// there too: an optimizer leaves what has no gradient alone.
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

  /// fp32 masters of parameters in 16 bits, as mixed precision has them.
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

Strategy strategy_of(const Placed& placed, const ProgramOptions& options) {
  Strategy strategy = strategy_for(placed, nullptr, options.dtype);
  strategy.optimizer.eps = kEps;
  if (options.adjust) options.adjust(strategy);
  return strategy;
}

void expect_close(double got, double wanted, double tolerance, const std::string& what) {
  EXPECT_LE(std::abs(got - wanted), tolerance * (std::abs(wanted) + 1)) << what << ": " << got << ", wanted " << wanted;
}

void compare(const Scene& got, const Scene& wanted, const ProgramOptions& options) {
  ASSERT_EQ(got.numbers.size(), wanted.numbers.size());
  for (std::size_t i = 0; i < got.numbers.size(); ++i) {
    expect_close(got.numbers[i], wanted.numbers[i], options.loss_tolerance,
                 "rank " + std::to_string(got.rank()) + ", number " + std::to_string(i));
  }
  ASSERT_EQ(got.values.size(), wanted.values.size());
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    const at::Tensor& value = wanted.values[i].second;
    ASSERT_EQ(got.values[i].second.sizes(), value.sizes()) << wanted.values[i].first;
    const at::Tensor difference = (got.values[i].second - value).abs() / (value.abs() + 1);
    const double most = difference.numel() == 0 ? 0 : difference.max().item<double>();
    EXPECT_LE(most, options.tolerance) << "rank " << got.rank() << ", " << wanted.values[i].first;
  }
}

void run_cell(const Cell& cell, const Program& program, const ProgramOptions& options, const Scene* plain) {
  SCOPED_TRACE(cell.name());
  const Strategy strategy = strategy_of(cell.placed, options);
  try {
    run_ranks({.ranks = cell.ranks, .timeout_s = options.timeout_s}, [&](const Mesh& mesh) {
      at::set_num_threads(1);
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, cell.name());  // a trace is its thread's own
      Scene scene(strategy, mesh);
      program(scene);
      if (plain) compare(scene, *plain, options);
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

}  // namespace

bool Scene::is_sharded() const {
  if (is_plain() || mesh_->world_size() == 1 || strategy_.host_sharing) return false;
  return strategy_.strategy == ShardingStrategy::kFullShard || strategy_.strategy == ShardingStrategy::kShardGradOp;
}

at::Tensor Scene::rows(const at::Tensor& batch, std::int64_t index, std::int64_t count) const {
  const std::int64_t rows = batch.size(0) / count;
  const at::Tensor microbatch = batch.narrow(0, index * rows, rows);
  return is_plain() ? microbatch : rows_of(microbatch, *mesh_);
}

std::unique_ptr<Trainer> Scene::trainer(std::shared_ptr<torch::nn::Module> module, const Adjust& adjust) {
  Strategy strategy = strategy_;
  if (adjust) adjust(strategy);
  if (is_plain()) return std::make_unique<PlainTrainer>(*this, std::move(module), strategy);
  return std::make_unique<EngineTrainer>(*this, std::move(module), strategy);
}

void Scene::note(Trainer& trainer, const torch::nn::Module& module) {
  trainer.read([&] {
    for (auto& value : values_of(module)) values.push_back(std::move(value));
  });
}

void Scene::refused(const Trainer::Action& call, const Refusal& wanted) const {
  if (is_plain()) return;
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), wanted.code.value_or(error.exit_code())) << error.message();
    for (const std::string& text : wanted.texts) EXPECT_THAT(error.message(), ::testing::HasSubstr(text));
    return;
  } catch (const c10::Error& error) {
    // An operator threw it. If it was the Engine that made it throw, the group has ended with the code.
    if (wanted.code) {
      EXPECT_EQ(exit_code_of(groups_of(*mesh_).status()), *wanted.code) << error.what();
    }
    for (const std::string& text : wanted.texts) EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    return;
  }
  ADD_FAILURE() << "rank " << rank() << ": accepted, wanted a refusal with \"" << wanted.texts.at(0) << "\"";
}

const std::vector<Cell>& matrix() {
  static const std::vector<Cell> cells = [] {
    std::vector<Cell> made;
    for (int ranks : {1, 2, 3}) {
      for (bool shared : {true, false}) {
        for (ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                                      ShardingStrategy::kShardGradients, ShardingStrategy::kNoShard}) {
          made.push_back({ranks, Placed(kind, shared)});
        }
      }
    }
    return made;
  }();
  return cells;
}

void expect_like_plain(const Program& program, const ProgramOptions& options) {
  at::set_num_threads(1);
  Scene plain(strategy_of(ShardingStrategy::kNoShard, options));
  program(plain);
  EXPECT_FALSE(plain.numbers.empty()) << "the program noted nothing";
  for (const Cell& cell : matrix()) run_cell(cell, program, options, &plain);
}

void on_matrix(const Program& program, const ProgramOptions& options) {
  for (const Cell& cell : matrix()) run_cell(cell, program, options, nullptr);
}

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

}  // namespace tessera::testing
