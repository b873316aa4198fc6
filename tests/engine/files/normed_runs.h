#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/recompute.h"
#include "tests/engine/files/reproducible_runs.h"

namespace tessera::testing::reproducible_test {

constexpr std::int64_t kAll = 8, kRows = 4, kWidth = 6, kNorms = 4, kStepsOfRun = 3;

/// A model with different batch norms: with a momentum, without a momentum, in a part that is computed again for
/// backward, used twice in each forward, and used only in some forwards.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    using torch::nn::BatchNormOptions;
    std::vector<torch::nn::Linear*> linears = {&up, &middle, &down};
    for (std::size_t i = 0; i < linears.size(); ++i) {
      *linears[i] = register_module("linear" + std::to_string(i), torch::nn::Linear(kWidth, kWidth));
      const at::NoGradGuard no_grad;
      int seed = static_cast<int>(i) * 3;
      for (at::Tensor& parameter : (*linears[i])->parameters())
        parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat) + ++seed).view(parameter.sizes()) * 0.5);
    }
    moving = register_module("moving", torch::nn::BatchNorm1d(kWidth));
    again = register_module("again", torch::nn::BatchNorm1d(BatchNormOptions(kWidth).momentum(0.3)));
    twice = register_module("twice", torch::nn::BatchNorm1d(BatchNormOptions(kWidth).momentum(std::nullopt)));
    rare = register_module("rare", torch::nn::BatchNorm1d(BatchNormOptions(kWidth).momentum(std::nullopt)));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_rare) {
    at::Tensor y = at::relu(moving(up(x)));
    y = checkpoint([this](const at::Tensor& in) { return at::relu(again(middle(in))); }, y);
    y = twice(twice(y) * 3 + x);
    return down(uses_rare ? rare(y) : y);
  }
  torch::nn::Linear up{nullptr}, middle{nullptr}, down{nullptr};
  torch::nn::BatchNorm1d moving{nullptr}, again{nullptr}, twice{nullptr}, rare{nullptr};
};
TORCH_MODULE(Normed);

/// Returns the input of a microbatch, [kRows, kWidth].
inline at::Tensor rows_of(std::int64_t step, std::int64_t microbatch) {
  const at::Tensor all =
      at::arange(kRows * kWidth, at::kDouble) + 100.0 * static_cast<double>(kAll * step + microbatch);
  return at::sin(all.square()).to(at::kFloat).view({kRows, kWidth}) + 0.1 * static_cast<double>(microbatch);
}

/// A run of the model, or a part of a run.
struct NormedRun {
  std::int64_t begin = 0, end = kStepsOfRun;
  std::filesystem::path from = {}, to = {};  ///< checkpoints that are loaded at first, and saved at the end
  int slow_rank = -1;                        ///< a rank that takes 20 ms longer than others for each microbatch
  bool has_gpu = false;                      ///< whether the rank trains on a real GPU
};

/// The bytes of parameters and buffers after a run, and the microbatches that other ranks made ("deal.backups").
struct NormedResult {
  std::string bytes;
  std::int64_t made_again = 0;
};

/// Trains on this rank.
inline NormedResult train_normed(const Mesh& mesh, const Strategy& strategy, const NormedRun& run = {}) {
  at::set_num_threads(1);
  Normed model;
  if (run.has_gpu) model->to(c10::Device(at::kCUDA));
  Engine engine(model, strategy, mesh);
  if (!run.from.empty()) load_checkpoint(engine, run.from);
  NormedResult result;
  for (std::int64_t step = run.begin; step < run.end; ++step) {
    while (!engine.step_is_due()) {
      const std::int64_t microbatch = engine.microbatch();
      const at::Tensor x = rows_of(step, microbatch).to(engine.device());
      const at::Tensor loss = (model->forward(x, microbatch % 3 == 1) - x).square().mean();
      if (mesh.rank() == run.slow_rank) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      engine.backward(loss);
    }
    const StepResult made = engine.step();
    result.made_again += made.made_again;
  }
  EXPECT_EQ(engine.plan().use, engine.allocated());
  if (!run.to.empty()) save_checkpoint(engine, run.to);
  const Gathered gathered(engine);
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor host = tensor.detach().cpu();
    result.bytes.append(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
  };
  for (const at::Tensor& parameter : model->parameters()) add(parameter);
  for (const at::Tensor& buffer : model->buffers()) add(buffer);
  return result;
}

/// Returns a strategy with "microbatch_order" for `ranks` ranks. If ranks do not divide the microbatches, they are
/// dealt.
inline Strategy in_order(const Placed& placed, GradientSync sync, int ranks) {
  Strategy strategy = tiny_strategy(placed, DType::kF32);
  strategy.units.classes = {"Linear"};
  strategy.reproducible = true;
  strategy.gradient_sync = sync;
  strategy.broadcast_buffers = BufferBroadcast::kMicrobatchOrder;
  strategy.gradient_accumulation = kAll / ranks;
  if (kAll % ranks != 0) {
    strategy.gradient_accumulation = 1;
    strategy.deal = {.by = DealBy::kSpeed, .window = 1, .microbatches = kAll};
  }
  return strategy;
}

}  // namespace tessera::testing::reproducible_test
