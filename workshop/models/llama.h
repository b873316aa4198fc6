#pragma once

// See docs/glossary.md: unit.

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "workshop/models/language_model.h"
#include "workshop/models/model_config.h"

namespace tessera::models {

/// Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467). The
/// quotient is computed in fp32, and then rounded to x's dtype.
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(std::int64_t width, double eps);
  at::Tensor forward(const at::Tensor& x);

 private:
  double eps_;
  at::Tensor weight_;
};
TORCH_MODULE(RMSNorm);

/// Tables of cos and sin of position * theta^(-2i / head_size), each [T, head_size]. The second half repeats the first
/// half, as in Hugging Face's layout. Element i is rotated with element i + head_size / 2 (Su et al., arXiv
/// 2104.09864). rope_type says how the frequencies theta^(-2i / head_size) are changed.
struct Rotary {
  at::Tensor cos, sin;

  /// Returns the tables for positions 0 to time - 1, in the dtype of `options`.
  static Rotary make(std::int64_t time, const LlamaConfig& config, const at::TensorOptions& options);
  /// Returns `x`, rotated. The shape of `x` is [B, heads, T, head_size].
  at::Tensor rotate(const at::Tensor& x) const;
};

/// Causal grouped-query attention (Ainslie et al., arXiv 2305.13245). Each key and value head is shared by
/// num_attention_heads / num_key_value_heads neighbouring query heads.
class LlamaAttentionImpl : public torch::nn::Module {
 public:
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  /// `mask` [T, T] bool says which positions a position sees; undefined means the positions up to itself.
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary, const at::Tensor& mask);

 private:
  torch::nn::Linear projection(std::int64_t in, std::int64_t out, bool bias) const;
  at::Tensor split_heads(const at::Tensor& x, std::int64_t heads) const;

  LlamaConfig config_;
  torch::nn::Linear q_proj_, k_proj_, v_proj_, o_proj_;
  RMSNorm q_norm_{nullptr}, k_norm_{nullptr};  ///< norms over head_size, before the rotation; empty without qk_norm
};
TORCH_MODULE(LlamaAttention);

/// Computes SwiGLU (Shazeer, arXiv 2002.05202): down(silu(gate(x)) * up(x)).
class LlamaMLPImpl : public torch::nn::Module {
 public:
  explicit LlamaMLPImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Linear gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(LlamaMLP);

/// Computes x + self_attn(input_layernorm(x)), and then x + mlp(post_attention_layernorm(x)). A block is the natural
/// unit of sharding.
class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary, const at::Tensor& mask);

 private:
  RMSNorm input_layernorm_, post_attention_layernorm_;
  LlamaAttention self_attn_;
  LlamaMLP mlp_;
};
TORCH_MODULE(LlamaBlock);

/// Llama, and the models that differ from it in a few options: Mistral, Qwen2, Qwen3. Parameters have the names and
/// shapes of Hugging Face's LlamaForCausalLM ("model.layers.0.mlp.up_proj.weight", ..., "lm_head.weight"), so its
/// checkpoints fit.
class LlamaImpl final : public LanguageModel {
 public:
  explicit LlamaImpl(const LlamaConfig& config);
  at::Tensor logits(const at::Tensor& tokens) override;
  std::int64_t vocab_size() const override { return config_.vocab_size; }
  std::int64_t seq_len() const override { return config_.max_position_embeddings; }

 private:
  /// The model without its head. It is a separate module only because of the parameters' names.
  struct DecoderImpl : torch::nn::Module {
    explicit DecoderImpl(const LlamaConfig& config);
    torch::nn::Embedding embed_tokens;
    torch::nn::ModuleList layers;
    RMSNorm norm;
  };

  LlamaConfig config_;
  std::shared_ptr<DecoderImpl> model_;
  torch::nn::Linear lm_head_{nullptr};  ///< empty if tied
};
TORCH_MODULE(Llama);

}  // namespace tessera::models
