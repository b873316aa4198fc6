#include "workshop/models/llama.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/where.h>

#include <numbers>
#include <optional>

#include "workshop/models/layers.h"

namespace tessera::models {

RMSNormImpl::RMSNormImpl(std::int64_t width, double eps)
    : eps_(eps), weight_(register_parameter("weight", at::ones({width}))) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor scaled = wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps_);
  return weight_ * scaled.to(x.scalar_type());
}

namespace {

/// Changes frequencies as rope_type "llama3" requires. Llama 3.1 was trained with this type (arXiv 2407.21783; the
/// formula is from Llama's reference code). Waves shorter than positions / high do not change. The frequencies of waves
/// longer than positions / low are divided by the factor, and those of waves between the two are mixed.
at::Tensor scaled_as_llama3(const at::Tensor& frequencies, const RopeConfig& rope) {
  const auto positions = static_cast<double>(rope.original_positions);
  const double low = rope.low_freq_factor, high = rope.high_freq_factor;
  const at::Tensor waves = 2 * std::numbers::pi / frequencies;
  const at::Tensor divided = frequencies / rope.factor;
  const at::Tensor share = (positions / waves - low) / (high - low);
  const at::Tensor mixed = (1 - share) * divided + share * frequencies;
  return at::where(waves > positions / low, divided, at::where(waves < positions / high, frequencies, mixed));
}

at::Tensor frequencies_of(const LlamaConfig& config, const at::TensorOptions& options) {
  const auto size = static_cast<double>(config.head_size());
  const at::Tensor exponents = at::arange(0, config.head_size(), 2, options) / size;
  const at::Tensor frequencies = 1.0 / at::pow(config.rope.theta, exponents);
  if (config.rope.type == "linear") return frequencies / config.rope.factor;
  return config.rope.type == "llama3" ? scaled_as_llama3(frequencies, config.rope) : frequencies;
}

bool has_qkv_bias(const LlamaConfig& config) { return config.attention_bias || config.qkv_bias; }

/// Returns a mask [time, time]. Element [i, j] is true if position i sees position j, which must be one of the last
/// `window` positions up to i. The mask is undefined if the window has all positions.
at::Tensor window_mask(std::int64_t window, std::int64_t time, const at::TensorOptions& options) {
  if (window == 0 || time <= window) return {};
  return at::ones({time, time}, options.dtype(at::kBool)).tril().triu(1 - window);
}

}  // namespace

Rotary Rotary::make(std::int64_t time, const LlamaConfig& config, const at::TensorOptions& options) {
  const at::TensorOptions wide = options.dtype(at::kFloat);  // bf16 cannot count positions beyond 256
  const at::Tensor angles = at::outer(at::arange(time, wide), frequencies_of(config, wide));
  const at::Tensor both = at::cat({angles, angles}, -1);
  return {both.cos().to(options), both.sin().to(options)};
}

at::Tensor Rotary::rotate(const at::Tensor& x) const {
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config)
    : config_(config),
      q_proj_(projection(config.hidden_size, config.num_attention_heads * config.head_size(), has_qkv_bias(config))),
      k_proj_(projection(config.hidden_size, config.key_value_heads() * config.head_size(), has_qkv_bias(config))),
      v_proj_(projection(config.hidden_size, config.key_value_heads() * config.head_size(), has_qkv_bias(config))),
      o_proj_(projection(config.num_attention_heads * config.head_size(), config.hidden_size, config.attention_bias)) {
  register_module("q_proj", q_proj_);
  register_module("k_proj", k_proj_);
  register_module("v_proj", v_proj_);
  register_module("o_proj", o_proj_);
  if (!config.qk_norm) return;
  q_norm_ = register_module("q_norm", RMSNorm(config.head_size(), config.rms_norm_eps));
  k_norm_ = register_module("k_norm", RMSNorm(config.head_size(), config.rms_norm_eps));
}

torch::nn::Linear LlamaAttentionImpl::projection(std::int64_t in, std::int64_t out, bool bias) const {
  return normal_linear(in, out, bias, config_.initializer_range);
}

at::Tensor LlamaAttentionImpl::split_heads(const at::Tensor& x, std::int64_t heads) const {
  return x.view({x.size(0), x.size(1), heads, config_.head_size()}).transpose(1, 2);
}

// Makes [B, heads * groups, T, D] from [B, heads, T, D]. Each head is repeated `groups` times in a row.
static at::Tensor repeat_heads(const at::Tensor& x, std::int64_t groups) {
  if (groups == 1) return x;
  const auto wide = x.unsqueeze(2).expand({x.size(0), x.size(1), groups, x.size(2), x.size(3)});
  return wide.reshape({x.size(0), x.size(1) * groups, x.size(2), x.size(3)});
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const Rotary& rotary, const at::Tensor& mask) {
  const std::int64_t heads = config_.num_attention_heads, shared = config_.key_value_heads();
  at::Tensor q = split_heads(linear(q_proj_, x), heads), k = split_heads(linear(k_proj_, x), shared);
  if (config_.qk_norm) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  q = rotary.rotate(q);
  k = repeat_heads(rotary.rotate(k), heads / shared);
  const at::Tensor v = repeat_heads(split_heads(linear(v_proj_, x), shared), heads / shared);
  const std::optional<at::Tensor> seen = mask.defined() ? std::optional(mask) : std::nullopt;
  const at::Tensor mixed = at::scaled_dot_product_attention(q, k, v, seen, 0.0, /*is_causal=*/!mask.defined());
  return linear(o_proj_, mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
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
  return linear(down_proj_, at::silu(linear(gate_proj_, x)) * linear(up_proj_, x));
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

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const Rotary& rotary, const at::Tensor& mask) {
  const at::Tensor attended = x + self_attn_->forward(input_layernorm_->forward(x), rotary, mask);
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
              config.key_value_heads(), " must divide num_attention_heads ", config.num_attention_heads,
              ". [T0365] hint: give a divisor, or leave it out for as many");
  TORCH_CHECK(config.head_size() % 2 == 0, "Llama: a head's size must be even, got ", config.head_size(),
              ". [T0366] hint: change \"head_dim\", or the number of heads");
  if (config.tie_word_embeddings) return;
  lm_head_ = register_module(
      "lm_head", normal_linear(config.hidden_size, config.vocab_size, /*bias=*/false, config.initializer_range));
}

at::Tensor LlamaImpl::logits(const at::Tensor& tokens) {
  check_tokens(tokens);
  at::Tensor x = model_->embed_tokens->forward(tokens);
  const Rotary rotary = Rotary::make(tokens.size(1), config_, x.options());
  const at::Tensor window = window_mask(config_.sliding_window, tokens.size(1), x.options());
  std::int64_t layer = 0;
  for (const std::shared_ptr<torch::nn::Module>& module : *model_->layers) {
    const auto block = std::static_pointer_cast<LlamaBlockImpl>(module);
    const at::Tensor mask = layer++ >= config_.max_window_layers ? window : at::Tensor();
    const auto run = [block, rotary, mask](const at::Tensor& input) { return block->forward(input, rotary, mask); };
    x = run_block(config_.recompute, run, x);
  }
  x = model_->norm->forward(x);
  return config_.tie_word_embeddings ? at::linear(x, model_->embed_tokens->weight) : linear(lm_head_, x);
}

}  // namespace tessera::models
