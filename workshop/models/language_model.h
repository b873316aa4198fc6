#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "workshop/models/model_config.h"

namespace tessera::models {

/// A function that runs `segment(input)` so that autograd stores only `input`, and runs the segment once more in
/// backward.
using CheckpointFn = std::function<at::Tensor(const std::function<at::Tensor(const at::Tensor&)>&, const at::Tensor&)>;

/// The interface of a language model that the command, the benchmarks and `generate` use. Otherwise a language model is
/// a plain module.
class LanguageModel : public torch::nn::Module {
 public:
  /// `tokens` are [B, T] int64, 0 < T <= seq_len(). Returns [B, T, vocab_size()], in the parameters' dtype.
  virtual at::Tensor logits(const at::Tensor& tokens) = 0;
  /// These functions return the number of tokens in the vocabulary, and the length of the longest input.
  virtual std::int64_t vocab_size() const = 0;
  virtual std::int64_t seq_len() const = 0;

  at::Tensor forward(const at::Tensor& tokens) { return logits(tokens); }
  /// `targets` are [B, T] int64, with -100 at positions that do not count. Returns the mean cross entropy, a scalar in
  /// fp32. The logits are cast to fp32 first. A softmax over a vocabulary in bf16 would make the third digit of the
  /// loss wrong.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

  /// Sets the hook through which blocks run if the config says "recompute". A model with such a config refuses to run
  /// without the hook.
  void set_checkpoint(CheckpointFn checkpoint) { checkpoint_ = std::move(checkpoint); }

 protected:
  /// Runs one block of the model, directly or through the hook. `block` must own everything that it uses, since it is
  /// called again later.
  at::Tensor run_block(bool recompute, const std::function<at::Tensor(const at::Tensor&)>& block,
                       const at::Tensor& input) const;
  void check_tokens(const at::Tensor& tokens) const;

 private:
  CheckpointFn checkpoint_;
};

/// Makes a model with fresh weights from LibTorch's default generator. It is an error (exit code 78) if the config says
/// "recompute" and there is no hook for it.
absl::StatusOr<std::shared_ptr<LanguageModel>> make_language_model(const ModelConfig& config,
                                                                   CheckpointFn checkpoint = nullptr);

}  // namespace tessera::models
