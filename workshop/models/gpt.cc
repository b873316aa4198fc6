#include "workshop/models/gpt.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <vector>

#include "workshop/models/layers.h"

namespace tessera::models {
namespace {

constexpr double kStd = 0.02;

// Each block adds twice to the residual stream. This deviation keeps the stream's variance from growing with the number
// of blocks.
double residual_std(const GPTConfig& config) { return kStd / std::sqrt(2.0 * static_cast<double>(config.layers)); }

torch::nn::LayerNorm layer_norm(const GPTConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width}).eps(config.norm_eps));
}

}  // namespace

AttentionImpl::AttentionImpl(const GPTConfig& config)
    : config_(config),
      qkv_(normal_linear(config.width, 3 * config.width, config.bias, kStd)),
      projection_(normal_linear(config.width, config.width, config.bias, residual_std(config))) {
  register_module("qkv", qkv_);
  register_module("projection", projection_);
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const std::int64_t batch = x.size(0), time = x.size(1), heads = config_.heads;
  // This call splits [B, T, 3 * width] into three tensors. The backward of a split puts the three gradients side by
  // side in one copy, and the product before the split needs them in this form. The backward of unbind would make a
  // second copy.
  std::vector<at::Tensor> qkv = linear(qkv_, x).split(config_.width, 2);
  for (at::Tensor& part : qkv) part = part.view({batch, time, heads, -1}).transpose(1, 2);
  const double dropout = is_training() ? config_.dropout : 0.0;
  const at::Tensor mixed =
      at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, dropout, /*is_causal=*/true);
  const at::Tensor joined = mixed.transpose(1, 2).reshape({batch, time, config_.width});
  return at::dropout(linear(projection_, joined), config_.dropout, is_training());
}

MLPImpl::MLPImpl(const GPTConfig& config)
    : dropout_(config.dropout),
      up_(normal_linear(config.width, config.mlp_ratio * config.width, config.bias, kStd)),
      down_(normal_linear(config.mlp_ratio * config.width, config.width, config.bias, residual_std(config))) {
  register_module("up", up_);
  register_module("down", down_);
}

at::Tensor MLPImpl::forward(const at::Tensor& x) {
  return at::dropout(linear(down_, at::gelu(linear(up_, x), "tanh")), dropout_, is_training());
}

BlockImpl::BlockImpl(const GPTConfig& config)
    : norm1_(layer_norm(config)), norm2_(layer_norm(config)), attention_(config), mlp_(config) {
  register_module("norm1", norm1_);
  register_module("attention", attention_);
  register_module("norm2", norm2_);
  register_module("mlp", mlp_);
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor attended = x + attention_->forward(norm1_->forward(x));
  return attended + mlp_->forward(norm2_->forward(attended));
}

GPTImpl::GPTImpl(const GPTConfig& config)
    : config_(config),
      token_embedding_(normal_embedding(config.vocab_size, config.width, kStd)),
      position_embedding_(normal_embedding(config.seq_len, config.width, kStd)),
      norm_(layer_norm(config)) {
  TORCH_CHECK(config.heads > 0 && config.width % config.heads == 0, "GPT: width ", config.width,
              " must be a multiple of heads ", config.heads, ". [T0356] hint: take a width of 64 for each head");
  register_module("token_embedding", token_embedding_);
  register_module("position_embedding", position_embedding_);
  register_module("blocks", blocks_);
  for (std::int64_t i = 0; i < config.layers; ++i) blocks_->push_back(Block(config));
  register_module("norm", norm_);
  if (!config.tie_head) {
    head_ = register_module("head", normal_linear(config.width, config.vocab_size, /*bias=*/false, kStd));
  }
}

at::Tensor GPTImpl::logits(const at::Tensor& tokens) {
  check_tokens(tokens);
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = token_embedding_->forward(tokens) + position_embedding_->forward(positions);
  x = at::dropout(x, config_.dropout, is_training());
  for (const std::shared_ptr<torch::nn::Module>& module : *blocks_) {
    const auto block = std::static_pointer_cast<BlockImpl>(module);
    x = run_block(
        config_.recompute, [block](const at::Tensor& input) { return block->forward(input); }, x);
  }
  x = norm_->forward(x);
  return config_.tie_head ? at::linear(x, token_embedding_->weight) : linear(head_, x);
}

}  // namespace tessera::models
