#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <variant>

namespace tessera::models {

/// GPT-2's shape (Radford et al., 2019); see gpt.h. Model files name it `"model": "gpt"`.
struct GPTConfig {
  std::int64_t vocab_size = 0;
  std::int64_t seq_len = 0;  ///< number of learned positions: the longest input
  std::int64_t layers = 0;
  std::int64_t width = 0;  ///< a multiple of heads
  std::int64_t heads = 0;
  std::int64_t mlp_ratio = 4;  ///< the feed-forward layer's width, as a multiple of `width`
  double dropout = 0.0;        ///< applied to embeddings, attention weights and both residual branches
  bool bias = true;            ///< biases in the linear layers of blocks; layer norms always have biases
  double norm_eps = 1e-5;      ///< added to the variance in layer norms
  bool tie_head = false;       ///< the output layer uses the token embedding's weight
  bool recompute = false;      ///< blocks keep only their input, and run again in backward
};

/// The frequencies of a Llama's rotary embeddings; each field's key has "rope_" in front.
struct RopeConfig {
  double theta = 10000.0;
  /// The change of frequencies for inputs longer than those of pretraining: "default" (no change), "linear" (all are
  /// divided by `factor`) or "llama3" (the frequencies of long waves are divided; the fields after `factor` say which
  /// waves are long).
  std::string type = "default";
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_positions = 8192;
};

/// Llama's shape (Touvron et al., arXiv 2302.13971), with the names of Hugging Face's config.json. Model files name it
/// `"model": "llama"`. Mistral is Llama with a sliding window, Qwen2 has biases of queries, keys and values, and Qwen3
/// has norms of queries and keys.
struct LlamaConfig {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;         ///< a divisor of num_attention_heads; 0: the same number
  std::int64_t head_dim = 0;                    ///< an even number; 0: hidden_size / num_attention_heads
  std::int64_t max_position_embeddings = 2048;  ///< the longest input; rotary embeddings have no parameters
  double rms_norm_eps = 1e-6;
  RopeConfig rope = {};
  double initializer_range = 0.02;
  bool attention_bias = false;  ///< biases in the attention's four linear layers
  bool qkv_bias = false;        ///< whether only the layers of queries, keys and values have biases (Qwen2)
  bool qk_norm = false;         ///< an RMS norm over each head of queries and keys (Qwen3)
  bool mlp_bias = false;
  /// A position sees this many positions, including itself, in layers from max_window_layers on (Mistral, arXiv
  /// 2310.06825). 0: it sees all earlier positions.
  std::int64_t sliding_window = 0;
  std::int64_t max_window_layers = 0;
  bool tie_word_embeddings = false;
  bool recompute = false;  ///< see GPTConfig; this is no key of Hugging Face

  std::int64_t key_value_heads() const { return num_key_value_heads > 0 ? num_key_value_heads : num_attention_heads; }
  std::int64_t head_size() const { return head_dim > 0 ? head_dim : hidden_size / num_attention_heads; }
};

/// The content of a language model's file: {"model": "gpt" or "llama", and the fields of its struct above}.
using ModelConfig = std::variant<GPTConfig, LlamaConfig>;

/// Reads and checks a model file (docs/models.md). If `path` is a folder, reads the config.json of Hugging Face in it
/// (hf_config.h). If there are errors, the status lists *all* of them, with exit code 78: unknown keys, wrong types,
/// values out of range, sizes that do not divide, more than 1e14 parameters. If the file cannot be read: 66 if it is
/// missing, 77 if permission is missing, 65 if it is no regular file.
absl::StatusOr<ModelConfig> read_model_config(const std::filesystem::path& path);
/// Reads a text; `name` stands for the file in messages.
absl::StatusOr<ModelConfig> parse_model_config(const std::string& text, const std::string& name = "model");

/// Returns the text of a model file with the same meaning and all keys. A key that was left out gets the value with
/// which the model is built.
std::string to_json(const ModelConfig& config);

/// Returns the number of parameters. A tied weight counts once. The number is computed with a formula, without making a
/// tensor.
std::int64_t parameter_count(const ModelConfig& config);

}  // namespace tessera::models
