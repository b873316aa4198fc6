#include "workshop/models/config_fields.h"

namespace tessera::models {
namespace {

// These limits are far above the sizes of models that are trained today. They are small enough that a typing error is
// refused at once, before it fills the machine's memory.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 27;     // tokens of a vocabulary
constexpr std::int64_t kMostPositions = std::int64_t{1} << 20;  // positions of an input
constexpr std::int64_t kMostLayers = 10'000;
constexpr std::int64_t kMostWidth = std::int64_t{1} << 20;
constexpr std::int64_t kMostHeads = std::int64_t{1} << 16;
constexpr std::int64_t kMostRatio = 1024;

constexpr IntegerRule needed(std::int64_t most) { return {.required = true, .least = 1, .most = most}; }
constexpr IntegerRule optional(std::int64_t most) { return {.least = 1, .most = most}; }
constexpr NumberRule kAboveZero{.least_excluded = true};

}  // namespace

void visit_fields(GPTConfig& config, ConfigVisitor& v) {
  v.integer("vocab_size", config.vocab_size, needed(kMostTokens), "Number of different tokens; 256 for text as bytes.");
  v.integer("seq_len", config.seq_len, needed(kMostPositions), "Learned positions: the longest input, in tokens.");
  v.integer("layers", config.layers, needed(kMostLayers), "Number of transformer blocks.");
  v.integer("width", config.width, needed(kMostWidth), "Size of the hidden state; a multiple of `heads`.");
  v.integer("heads", config.heads, needed(kMostHeads), "Attention heads of a block.");
  v.integer("mlp_ratio", config.mlp_ratio, optional(kMostRatio), "Width of the feed-forward layer, in widths.");
  v.number("dropout", config.dropout, {.below = 1.0},
           "Probability, for embeddings, attention weights and both residual branches.");
  v.boolean("bias", config.bias, "Biases of the linear layers in blocks. Layer norms always have one.");
  v.number("norm_eps", config.norm_eps, kAboveZero, "Added to the variance in layer norms.");
  v.boolean("tie_head", config.tie_head, "The output layer uses the token embedding's weight.");
  v.boolean("recompute", config.recompute,
            "Blocks keep only their input, and run again in backward: less memory, a third more compute.");
}

void visit_fields(LlamaConfig& config, ConfigVisitor& v) {
  v.integer("vocab_size", config.vocab_size, needed(kMostTokens), "Number of different tokens; 256 for text as bytes.");
  v.integer("hidden_size", config.hidden_size, needed(kMostWidth), "Size of the hidden state.");
  v.integer("intermediate_size", config.intermediate_size, needed(kMostWidth * 8), "Width of the feed-forward layer.");
  v.integer("num_hidden_layers", config.num_hidden_layers, needed(kMostLayers), "Number of transformer blocks.");
  v.integer("num_attention_heads", config.num_attention_heads, needed(kMostHeads), "Query heads of a block.");
  v.integer("num_key_value_heads", config.num_key_value_heads, optional(kMostHeads),
            "Key and value heads; divides `num_attention_heads`. Left out: equal to it.");
  v.integer("head_dim", config.head_dim, optional(kMostWidth),
            "Size of a head, even. Left out: `hidden_size` / `num_attention_heads`.");
  v.integer("max_position_embeddings", config.max_position_embeddings, optional(kMostPositions),
            "The longest input, in tokens. Rotary embeddings have no parameters.");
  v.number("rms_norm_eps", config.rms_norm_eps, kAboveZero, "Added to the mean square in RMS norms.");
  v.number("rope_theta", config.rope.theta, kAboveZero, "Base of the rotary embeddings' frequencies.");
  v.number("initializer_range", config.initializer_range, {}, "Standard deviation of fresh weights.");
  v.boolean("attention_bias", config.attention_bias, "Biases of the attention's four linear layers.");
  v.boolean("qkv_bias", config.qkv_bias, "Biases of the layers of queries, keys and values only, as Qwen2 has them.");
  v.boolean("qk_norm", config.qk_norm, "An RMS norm over each head of queries and keys, as Qwen3 has it.");
  v.boolean("mlp_bias", config.mlp_bias, "Biases of the feed-forward layers.");
  v.integer("sliding_window", config.sliding_window, {.least = 0, .most = kMostPositions},
            "A position sees this many, itself among them, as in Mistral; 0: all before it.");
  v.integer("max_window_layers", config.max_window_layers, {.least = 0, .most = kMostLayers},
            "Layers from this number on have the sliding window.");
  v.word("rope_type", config.rope.type, {"default", "linear", "llama3"},
         "How the rotary embeddings' frequencies are changed for inputs longer than those of pretraining: `linear` "
         "divides all by `rope_factor`, `llama3` those of long waves.");
  v.number("rope_factor", config.rope.factor, kAboveZero, "Divides frequencies; 1 for `default`.");
  v.number("rope_low_freq_factor", config.rope.low_freq_factor, kAboveZero,
           "`llama3`: waves longer than `rope_original_positions` / this are divided whole.");
  v.number("rope_high_freq_factor", config.rope.high_freq_factor, kAboveZero,
           "`llama3`: waves shorter than `rope_original_positions` / this stay as they are.");
  v.integer("rope_original_positions", config.rope.original_positions, optional(kMostPositions),
            "`llama3`: the longest input of pretraining.");
  v.boolean("tie_word_embeddings", config.tie_word_embeddings, "The output layer uses the token embedding's weight.");
  v.boolean("recompute", config.recompute,
            "Blocks keep only their input, and run again in backward. Not a key of Hugging Face.");
}

}  // namespace tessera::models
