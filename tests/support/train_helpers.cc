#include "tests/support/train_helpers.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>

#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {
namespace {

at::Tensor slice_of(const at::Tensor& batch, std::int64_t part, std::int64_t parts) {
  const std::int64_t rows = batch.size(0) / parts;
  return batch.narrow(0, part * rows, rows);
}

/// Returns whether the numbers are equal, or are both NaN. NaN has many forms.
bool same_number(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

Trained train_on(const Mesh& mesh, const Strategy& strategy, const TrainOptions& options) {
  at::set_num_threads(1);
  Tiny model = make_tiny(options.model, options.deferred);
  Engine engine(model.ptr(), strategy, mesh, options.own_rules);
  Trained trained;
  const auto batches = make_batches(options.steps, options.batch, options.length, options.model.vocab);
  const std::int64_t parts = mesh.world_size() * strategy.gradient_accumulation;
  for (const Batch& batch : batches) {
    for (std::int64_t m = 0; m < strategy.gradient_accumulation; ++m) {
      // Microbatch m of all ranks together is a contiguous part of the batch. If "reproducible" is set, each rank has a
      // run of microbatches instead.
      const std::int64_t part = strategy.reproducible ? engine.microbatch() : m * mesh.world_size() + mesh.rank();
      const at::Tensor tokens = slice_of(batch.tokens, part, parts).to(engine.device());
      const at::Tensor targets = slice_of(batch.targets, part, parts).to(engine.device());
      engine.backward(model->forward(tokens, targets), {tokens.numel(), tokens.size(0)});
    }
    trained.steps.push_back(engine.step());
  }
  for (StepResult& step : trained.steps) step.wait();
  {
    const Gathered gathered(engine);
    trained.values = values_of(*model);
  }
  trained.traffic = engine.traffic();
  trained.allocated_at_end = engine.allocated();
  return trained;
}

Trained train_on_threads(const ThreadRanks& ranks, const Strategy& strategy, const TrainOptions& options) {
  std::vector<Trained> all(ranks.ranks);
  run_ranks(ranks, [&](const Mesh& mesh) { all[mesh.rank()] = train_on(mesh, strategy, options); });
  for (int rank = 1; rank < ranks.ranks; ++rank) expect_same_bits(all[rank], all[0], "rank " + std::to_string(rank));
  return all[0];
}

Trained train_plainly(const Strategy& strategy, const TrainOptions& options) {
  Tiny model = make_tiny(options.model, false);
  std::vector<at::Tensor> trainable;  // a tied parameter occurs once; Module::parameters lists it under each name
  for (const at::Tensor& parameter : model->parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    const bool known = std::any_of(trainable.begin(), trainable.end(), same);
    if (parameter.requires_grad() && !known) trainable.push_back(parameter);
  }
  const OptimizerConfig& config = strategy.optimizer;
  torch::optim::AdamW optimizer(trainable, torch::optim::AdamWOptions(config.lr)
                                               .betas({config.beta1, config.beta2})
                                               .eps(config.eps)
                                               .weight_decay(config.weight_decay));
  Trained trained;
  for (const Batch& batch : make_batches(options.steps, options.batch, options.length, options.model.vocab)) {
    optimizer.zero_grad();
    const at::Tensor loss = model->forward(batch.tokens, batch.targets);
    loss.backward();
    StepResult result;
    result.loss = loss.item<double>();
    const double limit = strategy.gradient_clipping > 0 ? strategy.gradient_clipping : 1e30;
    result.grad_norm = torch::nn::utils::clip_grad_norm_(trainable, limit);
    optimizer.step();
    trained.steps.push_back(result);
  }
  trained.values = values_of(*model);
  return trained;
}

double largest_difference(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.values.size(), b.values.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    const at::Tensor difference = (a.values[i].second - b.values[i].second).abs() / (b.values[i].second.abs() + 1);
    largest = std::max(largest, difference.max().item<double>());
  }
  return largest;
}

void expect_same_bits(const Trained& a, const Trained& b, const std::string& what) {
  ASSERT_EQ(a.steps.size(), b.steps.size()) << what;
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_TRUE(same_number(a.steps[i].loss, b.steps[i].loss)) << what << ", step " << i;
    EXPECT_TRUE(same_number(a.steps[i].grad_norm, b.steps[i].grad_norm)) << what << ", step " << i;
    EXPECT_EQ(a.steps[i].overflow, b.steps[i].overflow) << what << ", step " << i;
    EXPECT_EQ(a.steps[i].lr, b.steps[i].lr) << what << ", step " << i;
    EXPECT_EQ(a.steps[i].loss_scale, b.steps[i].loss_scale) << what << ", step " << i;
    EXPECT_EQ(a.steps[i].tokens, b.steps[i].tokens) << what << ", step " << i;
  }
  ASSERT_EQ(a.values.size(), b.values.size()) << what;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    EXPECT_TRUE(same_bits(a.values[i].second, b.values[i].second)) << what << ", " << a.values[i].first;
  }
}

}  // namespace tessera::testing
