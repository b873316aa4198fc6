#pragma once

// See docs/glossary.md: unit.

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "workshop/models/language_model.h"
#include "workshop/models/model_config.h"

namespace tessera::models {

/// Causal self-attention over [B, T, width]: position t sees positions 0 to t.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  GPTConfig config_;
  torch::nn::Linear qkv_, projection_;
};
TORCH_MODULE(Attention);

/// Computes width -> mlp_ratio * width -> width, with GELU in its tanh form between the two layers.
class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  double dropout_;
  torch::nn::Linear up_, down_;
};
TORCH_MODULE(MLP);

/// Computes x + attention(norm1(x)), then x + mlp(norm2(x)). The norms come first ("pre-LN"). A block is the natural
/// unit of sharding.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::LayerNorm norm1_, norm2_;
  Attention attention_;
  MLP mlp_;
};
TORCH_MODULE(Block);

/// GPT-2: learned token and position embeddings, blocks, a last norm, and a linear head without bias. Weights start
/// from N(0, 0.02^2). Weights that write into the residual stream have the deviation 0.02 / sqrt(2 * layers).
///
///     GPT model(GPTConfig{.vocab_size = 8192, .seq_len = 128, .layers = 8, .width = 768, .heads = 12});
///     at::Tensor loss = model->forward(tokens, targets);
class GPTImpl final : public LanguageModel {
 public:
  explicit GPTImpl(const GPTConfig& config);
  at::Tensor logits(const at::Tensor& tokens) override;
  std::int64_t vocab_size() const override { return config_.vocab_size; }
  std::int64_t seq_len() const override { return config_.seq_len; }
  const GPTConfig& config() const { return config_; }

 private:
  GPTConfig config_;
  torch::nn::Embedding token_embedding_, position_embedding_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_{nullptr};  ///< empty if tied
};
TORCH_MODULE(GPT);

}  // namespace tessera::models
