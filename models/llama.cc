#include "models/llama.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include "models/initialisation.h"

namespace tessera::models {

RMSNormImpl::RMSNormImpl(std::int64_t width, double eps)
    : eps_(eps), weight_(register_parameter("weight", at::ones({width}))) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor scaled = wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps_);
  return weight_ * scaled.to(x.scalar_type());
}

Rotary Rotary::make(std::int64_t time, const LlamaConfig& config, const at::TensorOptions& options) {
  const at::TensorOptions wide = options.dtype(at::kFloat);  // bf16 cannot count positions beyond 256
  const auto size = static_cast<double>(config.head_size());
  const at::Tensor exponents = at::arange(0, config.head_size(), 2, wide) / size;
  const at::Tensor frequencies = at::pow(config.rope_theta, -exponents);
  const at::Tensor angles = at::outer(at::arange(time, wide), frequencies);
  const at::Tensor both = at::cat({angles, angles}, -1);
  return {both.cos().to(options), both.sin().to(options)};
}

at::Tensor Rotary::rotate(const at::Tensor& x) const {
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config)
    : config_(config),
      q_proj_(normal_linear(config.hidden_size, config.num_attention_heads * config.head_size(), config.attention_bias,
                            config.initializer_range)),
      k_proj_(normal_linear(config.hidden_size, config.key_value_heads() * config.head_size(), config.attention_bias,
                            config.initializer_range)),
      v_proj_(normal_linear(config.hidden_size, config.key_value_heads() * config.head_size(), config.attention_bias,
                            config.initializer_range)),
      o_proj_(normal_linear(config.num_attention_heads * config.head_size(), config.hidden_size, config.attention_bias,
                            config.initializer_range)) {
  register_module("q_proj", q_proj_);
  register_module("k_proj", k_proj_);
  register_module("v_proj", v_proj_);
  register_module("o_proj", o_proj_);
}

at::Tensor LlamaAttentionImpl::split_heads(const at::Tensor& x, std::int64_t heads) const {
  return x.view({x.size(0), x.size(1), heads, config_.head_size()}).transpose(1, 2);
}

// [B, heads, T, D] -> [B, heads * groups, T, D], each head `groups` times in a row.
static at::Tensor repeat_heads(const at::Tensor& x, std::int64_t groups) {
  if (groups == 1) return x;
  const auto wide = x.unsqueeze(2).expand({x.size(0), x.size(1), groups, x.size(2), x.size(3)});
  return wide.reshape({x.size(0), x.size(1) * groups, x.size(2), x.size(3)});
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const Rotary& rotary) {
  const std::int64_t heads = config_.num_attention_heads, shared = config_.key_value_heads();
  const at::Tensor q = rotary.rotate(split_heads(q_proj_->forward(x), heads));
  const at::Tensor k = repeat_heads(rotary.rotate(split_heads(k_proj_->forward(x), shared)), heads / shared);
  const at::Tensor v = repeat_heads(split_heads(v_proj_->forward(x), shared), heads / shared);
  const at::Tensor mixed = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, 0.0, /*is_causal=*/true);
  return o_proj_->forward(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
}

LlamaMLPImpl::LlamaMLPImpl(const LlamaConfig& config)
    : gate_proj_(
          normal_linear(config.hidden_size, config.intermediate_size, config.mlp_bias, config.initializer_range)),
      up_proj_(normal_linear(config.hidden_size, config.intermediate_size, config.mlp_bias, config.initializer_range)),
      down_proj_(
          normal_linear(config.intermediate_size, config.hidden_size, config.mlp_bias, config.initializer_range)) {
  register_module("gate_proj", gate_proj_);
  register_module("up_proj", up_proj_);
  register_module("down_proj", down_proj_);
}

at::Tensor LlamaMLPImpl::forward(const at::Tensor& x) {
  return down_proj_->forward(at::silu(gate_proj_->forward(x)) * up_proj_->forward(x));
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config)
    : input_layernorm_(config.hidden_size, config.rms_norm_eps),
      post_attention_layernorm_(config.hidden_size, config.rms_norm_eps),
      self_attn_(config),
      mlp_(config) {
  register_module("self_attn", self_attn_);
  register_module("mlp", mlp_);
  register_module("input_layernorm", input_layernorm_);
  register_module("post_attention_layernorm", post_attention_layernorm_);
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const Rotary& rotary) {
  const at::Tensor attended = x + self_attn_->forward(input_layernorm_->forward(x), rotary);
  return attended + mlp_->forward(post_attention_layernorm_->forward(attended));
}

LlamaImpl::DecoderImpl::DecoderImpl(const LlamaConfig& config)
    : embed_tokens(normal_embedding(config.vocab_size, config.hidden_size, config.initializer_range)),
      norm(config.hidden_size, config.rms_norm_eps) {
  register_module("embed_tokens", embed_tokens);
  register_module("layers", layers);
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) layers->push_back(LlamaBlock(config));
  register_module("norm", norm);
}

LlamaImpl::LlamaImpl(const LlamaConfig& config)
    : config_(config), model_(register_module("model", std::make_shared<DecoderImpl>(config))) {
  TORCH_CHECK(config.num_attention_heads % config.key_value_heads() == 0, "Llama: num_key_value_heads ",
              config.key_value_heads(), " must divide num_attention_heads ", config.num_attention_heads);
  TORCH_CHECK(config.head_size() % 2 == 0, "Llama: a head's size must be even, got ", config.head_size());
  if (config.tie_word_embeddings) return;
  lm_head_ = register_module(
      "lm_head", normal_linear(config.hidden_size, config.vocab_size, /*bias=*/false, config.initializer_range));
}

at::Tensor LlamaImpl::logits(const at::Tensor& tokens) {
  check_tokens(tokens);
  at::Tensor x = model_->embed_tokens->forward(tokens);
  const Rotary rotary = Rotary::make(tokens.size(1), config_, x.options());
  for (const std::shared_ptr<torch::nn::Module>& module : *model_->layers) {
    const auto block = std::static_pointer_cast<LlamaBlockImpl>(module);
    const auto run = [block, rotary](const at::Tensor& input) { return block->forward(input, rotary); };
    x = run_block(config_.recompute, run, x);
  }
  x = model_->norm->forward(x);
  return config_.tie_word_embeddings ? at::linear(x, model_->embed_tokens->weight) : lm_head_->forward(x);
}

}  // namespace tessera::models
