#include "models/model_config.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "models/config_reader.h"
#include "runtime/base/status.h"

namespace tessera::models {
namespace {

constexpr ConfigReader::IntegerRule kNeeded{.required = true, .least = 1};
constexpr ConfigReader::IntegerRule kPositive{.least = 1};
constexpr ConfigReader::NumberRule kAboveZero{.least_excluded = true};

GPTConfig read_gpt(ConfigReader& reader) {
  GPTConfig config;
  reader.integer("vocab_size", config.vocab_size, kNeeded);
  reader.integer("seq_len", config.seq_len, kNeeded);
  reader.integer("layers", config.layers, kNeeded);
  reader.integer("width", config.width, kNeeded);
  reader.integer("heads", config.heads, kNeeded);
  reader.integer("mlp_ratio", config.mlp_ratio, kPositive);
  reader.number("dropout", config.dropout, {.below = 1.0});
  reader.boolean("bias", config.bias);
  reader.boolean("tie_head", config.tie_head);
  reader.boolean("recompute", config.recompute);
  reader.require(config.heads == 0 || config.width % config.heads == 0, "width", {"width", "heads"},
                 fmt::format("must be a multiple of heads: {} is not one of {}", config.width, config.heads));
  return config;
}

void check_llama_heads(ConfigReader& reader, const LlamaConfig& config) {
  const std::int64_t heads = config.num_attention_heads;
  if (heads == 0) return;  // reported already
  reader.require(config.head_dim > 0 || config.hidden_size % heads == 0, "hidden_size",
                 {"hidden_size", "num_attention_heads", "head_dim"},
                 fmt::format("must be a multiple of num_attention_heads where head_dim is not given: {} is not one "
                             "of {}",
                             config.hidden_size, heads));
  reader.require(
      config.head_size() % 2 == 0, config.head_dim > 0 ? "head_dim" : "hidden_size",
      {"hidden_size", "num_attention_heads", "head_dim"},
      fmt::format("rotary embeddings turn pairs, so a head's size must be even: it is {}", config.head_size()));
  reader.require(
      heads % config.key_value_heads() == 0, "num_key_value_heads", {"num_attention_heads", "num_key_value_heads"},
      fmt::format("must divide num_attention_heads: {} does not divide {}", config.num_key_value_heads, heads));
}

LlamaConfig read_llama(ConfigReader& reader) {
  LlamaConfig config;
  reader.integer("vocab_size", config.vocab_size, kNeeded);
  reader.integer("hidden_size", config.hidden_size, kNeeded);
  reader.integer("intermediate_size", config.intermediate_size, kNeeded);
  reader.integer("num_hidden_layers", config.num_hidden_layers, kNeeded);
  reader.integer("num_attention_heads", config.num_attention_heads, kNeeded);
  reader.integer("num_key_value_heads", config.num_key_value_heads, kPositive);
  reader.integer("head_dim", config.head_dim, kPositive);
  reader.integer("max_position_embeddings", config.max_position_embeddings, kPositive);
  reader.number("rms_norm_eps", config.rms_norm_eps, kAboveZero);
  reader.number("rope_theta", config.rope_theta, kAboveZero);
  reader.number("initializer_range", config.initializer_range, {});
  reader.boolean("attention_bias", config.attention_bias);
  reader.boolean("mlp_bias", config.mlp_bias);
  reader.boolean("tie_word_embeddings", config.tie_word_embeddings);
  reader.boolean("recompute", config.recompute);
  check_llama_heads(reader, config);
  return config;
}

ModelConfig read_root(const JsonNode& root, Diagnostics& diagnostics) {
  ModelConfig config;
  if (!root.is_object()) {
    diagnostics.add(root.offset, "", "must be an object, got " + describe(root));
    return config;
  }
  ConfigReader reader(root, diagnostics);
  const std::string model = reader.word("model", {"gpt", "llama"});
  if (model.empty()) return config;  // whose keys to expect is not known
  if (model == "gpt") config = read_gpt(reader);
  if (model == "llama") config = read_llama(reader);
  reader.finish();
  return config;
}

std::int64_t linear(std::int64_t in, std::int64_t out, bool bias) { return in * out + (bias ? out : 0); }

std::int64_t count(const GPTConfig& c) {
  const std::int64_t norm = 2 * c.width;
  const std::int64_t attention = linear(c.width, 3 * c.width, c.bias) + linear(c.width, c.width, c.bias);
  const std::int64_t hidden = c.mlp_ratio * c.width;
  const std::int64_t mlp = linear(c.width, hidden, c.bias) + linear(hidden, c.width, c.bias);
  const std::int64_t tokens = c.vocab_size * c.width;
  return tokens + c.seq_len * c.width + c.layers * (2 * norm + attention + mlp) + norm + (c.tie_head ? 0 : tokens);
}

std::int64_t count(const LlamaConfig& c) {
  const std::int64_t queries = c.num_attention_heads * c.head_size();
  const std::int64_t keys = c.key_value_heads() * c.head_size();
  const std::int64_t attention = linear(c.hidden_size, queries, c.attention_bias) +
                                 2 * linear(c.hidden_size, keys, c.attention_bias) +
                                 linear(queries, c.hidden_size, c.attention_bias);
  const std::int64_t mlp = 2 * linear(c.hidden_size, c.intermediate_size, c.mlp_bias) +
                           linear(c.intermediate_size, c.hidden_size, c.mlp_bias);
  const std::int64_t tokens = c.vocab_size * c.hidden_size;
  return tokens + c.num_hidden_layers * (2 * c.hidden_size + attention + mlp) + c.hidden_size +
         (c.tie_word_embeddings ? 0 : tokens);
}

}  // namespace

absl::StatusOr<ModelConfig> parse_model_config(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  ModelConfig config;
  if (const auto root = parse_json(text, diagnostics)) config = read_root(*root, diagnostics);
  TESSERA_RETURN_IF_ERROR(diagnostics.to_status());
  return config;
}

absl::StatusOr<ModelConfig> read_model_config(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) {
    return make_error(ExitCode::kNoInput, fmt::format("{}: the model file cannot be read", path.string()));
  }
  return parse_model_config(text, path.string());
}

std::int64_t parameter_count(const ModelConfig& config) {
  return std::visit([](const auto& c) { return count(c); }, config);
}

}  // namespace tessera::models
