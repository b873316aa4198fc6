#include "workshop/models/model_config.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/base/input_file.h"
#include "runtime/base/status.h"
#include "workshop/models/config_fields.h"
#include "workshop/models/config_reader.h"
#include "workshop/models/hf_config.h"

namespace tessera::models {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;

void check(ConfigReader& reader, const GPTConfig& config) {
  reader.require(config.heads == 0 || config.width % config.heads == 0, "width", {"width", "heads"},
                 fmt::format("must be a multiple of heads: {} is not one of {}", config.width, config.heads));
}

void check(ConfigReader& reader, const LlamaConfig& config) {
  const std::int64_t heads = config.num_attention_heads;
  if (heads == 0) return;  // this was reported already
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
  reader.require(!(config.attention_bias && config.qkv_bias), "qkv_bias", {},
                 "attention_bias gives all four layers a bias already: one of the two must be false");
  reader.require(config.rope.type != "default" || config.rope.factor == 1.0, "rope_factor",
                 {"rope_type", "rope_factor"}, "wants a rope_type, linear or llama3");
  reader.require(config.rope.low_freq_factor < config.rope.high_freq_factor, "rope_low_freq_factor",
                 {"rope_low_freq_factor", "rope_high_freq_factor"},
                 fmt::format("must be below rope_high_freq_factor, which is {}", config.rope.high_freq_factor));
}

/// Counts parameters in `Number`: first in double, to see whether 64 bits suffice, and then in std::int64_t.
template <class Number>
Number linear(Number in, Number out, bool bias) {
  return in * out + (bias ? out : Number{0});
}

template <class Number>
Number count(const GPTConfig& c) {
  const auto width = static_cast<Number>(c.width), tokens = static_cast<Number>(c.vocab_size) * width;
  const Number norm = 2 * width, hidden = static_cast<Number>(c.mlp_ratio) * width;
  const Number attention = linear(width, 3 * width, c.bias) + linear(width, width, c.bias);
  const Number mlp = linear(width, hidden, c.bias) + linear(hidden, width, c.bias);
  return tokens + static_cast<Number>(c.seq_len) * width +
         static_cast<Number>(c.layers) * (2 * norm + attention + mlp) + norm + (c.tie_head ? Number{0} : tokens);
}

template <class Number>
Number count(const LlamaConfig& c) {
  const auto hidden = static_cast<Number>(c.hidden_size), inner = static_cast<Number>(c.intermediate_size);
  const auto head = static_cast<Number>(c.head_size()), tokens = static_cast<Number>(c.vocab_size) * hidden;
  const Number queries = static_cast<Number>(c.num_attention_heads) * head;
  const Number keys = static_cast<Number>(c.key_value_heads()) * head;
  const bool qkv_bias = c.attention_bias || c.qkv_bias;
  const Number attention = linear(hidden, queries, qkv_bias) + 2 * linear(hidden, keys, qkv_bias) +
                           linear(queries, hidden, c.attention_bias) + (c.qk_norm ? 2 * head : Number{0});
  const Number mlp = 2 * linear(hidden, inner, c.mlp_bias) + linear(inner, hidden, c.mlp_bias);
  return tokens + static_cast<Number>(c.num_hidden_layers) * (2 * hidden + attention + mlp) + hidden +
         (c.tie_word_embeddings ? Number{0} : tokens);
}

template <class Config>
Config read_fields(ConfigReader& reader, const JsonNode& root, Diagnostics& diagnostics) {
  Config config;
  visit_fields(config, reader);
  check(reader, config);
  reader.finish();
  if (!diagnostics.empty()) return config;
  if (const double parameters = count<double>(config); parameters > kMostParameters)
    diagnostics.add(root.offset, "",
                    fmt::format("a model of {:.3g} parameters; want {:g} at most", parameters, kMostParameters));
  return config;
}

ModelConfig read_root(const JsonNode& root, Diagnostics& diagnostics) {
  if (!root.is_object()) {
    diagnostics.add(root.offset, "", "must be an object, got " + describe(root));
    return {};
  }
  ConfigReader reader(root, diagnostics);
  const std::string model = reader.needed_word("model", {"gpt", "llama"});
  if (model == "gpt") return read_fields<GPTConfig>(reader, root, diagnostics);
  if (model == "llama") return read_fields<LlamaConfig>(reader, root, diagnostics);
  return {};  // without a valid model, no key can be expected
}

/// Writes one member for each key, with the value with which the model is built.
class ConfigWriter final : public ConfigVisitor {
 public:
  explicit ConfigWriter(const char* model) : json_{{"model", model}} {}
  void integer(const std::string& key, std::int64_t& value, const IntegerRule&, const char*) override {
    json_[key] = value;
  }
  void number(const std::string& key, double& value, const NumberRule&, const char*) override { json_[key] = value; }
  void boolean(const std::string& key, bool& value, const char*) override { json_[key] = value; }
  void word(const std::string& key, std::string& value, const std::vector<std::string>&, const char*) override {
    json_[key] = value;
  }
  const nlohmann::ordered_json& json() const { return json_; }

 private:
  nlohmann::ordered_json json_;
};

nlohmann::ordered_json json_of(GPTConfig config) {
  ConfigWriter writer("gpt");
  visit_fields(config, writer);
  return writer.json();
}

nlohmann::ordered_json json_of(LlamaConfig config) {
  config.head_dim = config.head_size();
  config.num_key_value_heads = config.key_value_heads();
  ConfigWriter writer("llama");
  visit_fields(config, writer);
  return writer.json();
}

}  // namespace

absl::StatusOr<ModelConfig> parse_model_config(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  ModelConfig config;
  if (const auto root = parse_json(text, diagnostics)) config = read_root(*root, diagnostics);
  TESSERA_RETURN_IF_ERROR(diagnostics.to_status("[T0367] hint: docs/models.md lists every key of a model file"));
  return config;
}

absl::StatusOr<ModelConfig> read_model_config(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return read_hf_config(path);
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_input_file(path, "model file", kMaxFileBytes));
  return parse_model_config(text, path.string());
}

std::int64_t parameter_count(const ModelConfig& config) {
  return std::visit([](const auto& c) { return count<std::int64_t>(c); }, config);
}

std::string to_json(const ModelConfig& config) {
  return std::visit([](const auto& c) { return json_of(c); }, config).dump(2);
}

}  // namespace tessera::models
