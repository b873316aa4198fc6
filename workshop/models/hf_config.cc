#include "workshop/models/hf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "runtime/base/input_file.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/config/json_document.h"
#include "workshop/models/config_fields.h"
#include "workshop/models/config_reader.h"

namespace tessera::models {
namespace {

// Translates config.json of Hugging Face to a model's configuration, and back.
//
// HfReader reads one config.json. The fields of GPTConfig and LlamaConfig are read by their own visitor under other
// names (RenamedFields), so they have the bounds and messages of model files. Keys that have another form in
// config.json (windows, rotary embeddings, switches that must have one value) each have a function. A key must be read,
// or be harmless (kHarmless), or else it is listed in `unknown`. The other direction chooses the model type that has
// all features of the configuration (`family_of`), and writes its keys (`hugging_face_json`).

constexpr std::size_t kMostFileBytes = std::size_t{1} << 20;

/// Keys of config.json that do not affect the computation of a model.
const char* const kHarmless[] = {"_name_or_path",
                                 "architectures",
                                 "auto_map",
                                 "bos_token_id",
                                 "chunk_size_feed_forward",
                                 "dtype",
                                 "eos_token_id",
                                 "id2label",
                                 "initializer_range",
                                 "is_encoder_decoder",
                                 "label2id",
                                 "layer_types",
                                 "n_ctx",
                                 "output_attentions",
                                 "output_hidden_states",
                                 "pad_token_id",
                                 "pretraining_tp",
                                 "problem_type",
                                 "return_dict",
                                 "summary_activation",
                                 "summary_first_dropout",
                                 "summary_proj_to_labels",
                                 "summary_type",
                                 "summary_use_proj",
                                 "task_specific_params",
                                 "torch_dtype",
                                 "transformers_version",
                                 "unk_token_id",
                                 "use_cache"};

/// Leaves out the members that are null: `transformers` treats them as missing.
JsonNode without_nulls(const JsonNode& node) {
  JsonNode result = node;
  std::erase_if(result.children, [](const JsonNode& child) { return child.value.is_null(); });
  return result;
}

const JsonNode* child_of(const JsonNode& node, const std::string& key) {
  const auto found = std::ranges::find(node.children, key, &JsonNode::key);
  return found == node.children.end() ? nullptr : &*found;
}

/// Gives Hugging Face's names to the fields of a model's own visitor. Bounds, types and messages stay the same. Fields
/// that the map leaves out are not read.
class RenamedFields final : public ConfigVisitor {
 public:
  using Names = std::vector<std::pair<std::string, std::string>>;  ///< name in Tessera, name in transformers
  RenamedFields(ConfigReader& reader, Names names) : reader_(reader), names_(std::move(names)) {}
  void integer(const std::string& key, std::int64_t& value, const IntegerRule& rule, const char* doc) override {
    IntegerRule optional = rule;
    optional.required = rule.required && value == 0;  // transformers has a default for this key
    if (const auto name = name_of(key)) reader_.integer(*name, value, optional, doc);
  }
  void number(const std::string& key, double& value, const NumberRule& rule, const char* doc) override {
    if (const auto name = name_of(key)) reader_.number(*name, value, rule, doc);
  }
  void boolean(const std::string& key, bool& value, const char* doc) override {
    if (const auto name = name_of(key)) reader_.boolean(*name, value, doc);
  }
  void word(const std::string& key, std::string& value, const std::vector<std::string>& allowed,
            const char* doc) override {
    if (const auto name = name_of(key)) reader_.word(*name, value, allowed, doc);
  }

 private:
  std::optional<std::string> name_of(const std::string& key) const {
    const auto found = std::ranges::find(names_, key, &Names::value_type::first);
    return found == names_.end() ? std::nullopt : std::optional(found->second);
  }
  ConfigReader& reader_;
  const Names names_;
};

/// Reads one config.json. Numbers that the file leaves out get the defaults of transformers' classes.
class HfReader {
 public:
  /// `root` has no null members; `nulls` are the keys of members that were null.
  HfReader(const JsonNode& root, std::vector<std::string> nulls, Diagnostics& diagnostics)
      : root_(root), nulls_(std::move(nulls)), diagnostics_(diagnostics), reader_(root, diagnostics) {}

  HfConfig read() {
    for (const char* key : kHarmless) known_.push_back(key);
    type_ = reader_.needed_word("model_type", {"gpt2", "llama", "mistral", "qwen2", "qwen3"});
    HfConfig result;
    if (type_ == "gpt2") result.config = gpt2();
    if (!type_.empty() && type_ != "gpt2") result.config = llama();
    for (const std::string& key : reader_.unknown())
      if (std::ranges::find(known_, key) == known_.end()) result.unknown.push_back(key);
    return result;
  }

 private:
  void refuse(const std::string& key, const std::string& message) { reader_.require(false, key, {key}, message); }
  /// Checks a switch for which the models of Tessera allow only one value.
  void must_be(const std::string& key, bool wanted, bool standard) {
    bool value = standard;
    reader_.boolean(key, value, "");
    if (value != wanted) refuse(key, fmt::format("must be {}: the other way is not built", wanted));
  }
  double probability(const std::string& key, double value) {
    reader_.number(key, value, {.below = 1.0}, "");
    return value;
  }

  GPTConfig gpt2() {
    GPTConfig config{.vocab_size = 50257, .seq_len = 1024, .layers = 12, .width = 768, .heads = 12};
    config.tie_head = true;
    RenamedFields fields(reader_, {{"vocab_size", "vocab_size"},
                                   {"seq_len", "n_positions"},
                                   {"layers", "n_layer"},
                                   {"width", "n_embd"},
                                   {"heads", "n_head"},
                                   {"norm_eps", "layer_norm_epsilon"},
                                   {"tie_head", "tie_word_embeddings"}});
    visit_fields(config, fields);
    std::int64_t inner = 4 * config.width;
    reader_.integer("n_inner", inner, {.least = 1, .most = config.width * 1024}, "");
    reader_.require(inner % config.width == 0, "n_inner", {"n_inner", "n_embd"},
                    fmt::format("must be a multiple of n_embd: {} is not one of {}", inner, config.width));
    config.mlp_ratio = inner / config.width;
    reader_.require(config.width % config.heads == 0, "n_embd", {"n_embd", "n_head"}, "must be a multiple of n_head");
    std::string activation = "gelu_new";
    reader_.word("activation_function", activation, {"gelu_new", "gelu_pytorch_tanh"}, "");
    const double residual = probability("resid_pdrop", 0.1), embedding = probability("embd_pdrop", 0.1),
                 attention = probability("attn_pdrop", 0.1);
    reader_.require(
        residual == embedding && residual == attention, "resid_pdrop", {"resid_pdrop", "embd_pdrop", "attn_pdrop"},
        fmt::format(
            "resid_pdrop, embd_pdrop and attn_pdrop must be equal, got {}, {} and {}: the model has one dropout",
            residual, embedding, attention));
    config.dropout = residual;
    must_be("scale_attn_weights", true, true);
    must_be("scale_attn_by_inverse_layer_idx", false, false);
    must_be("reorder_and_upcast_attn", false, false);
    must_be("add_cross_attention", false, false);
    return config;
  }

  /// Returns the numbers that transformers' class uses if a file gives none.
  LlamaConfig standard_llama() const {
    LlamaConfig config{.vocab_size = 32000,
                       .hidden_size = 4096,
                       .intermediate_size = 11008,
                       .num_hidden_layers = 32,
                       .num_attention_heads = 32};
    if (type_ == "mistral") {
      config.intermediate_size = 14336;
      config.num_key_value_heads = 8;
      config.max_position_embeddings = 131072;
    }
    if (type_ == "qwen2" || type_ == "qwen3") {
      config.vocab_size = 151936;
      config.intermediate_size = 22016;
      config.num_key_value_heads = 32;
      config.max_position_embeddings = 32768;
    }
    if (type_ == "qwen3") config.head_dim = 128;
    return config;
  }

  LlamaConfig llama() {
    LlamaConfig config = standard_llama();
    RenamedFields::Names names;
    for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
                            "rms_norm_eps", "initializer_range", "tie_word_embeddings"})
      names.emplace_back(key, key);
    if (type_ == "llama" || type_ == "qwen3") names.emplace_back("attention_bias", "attention_bias");
    if (type_ == "llama") names.emplace_back("mlp_bias", "mlp_bias");
    RenamedFields fields(reader_, names);
    visit_fields(config, fields);
    config.qkv_bias = type_ == "qwen2";
    config.qk_norm = type_ == "qwen3";
    std::string activation = "silu";
    reader_.word("hidden_act", activation, {"silu"}, "");
    if (probability("attention_dropout", 0.0) != 0.0)
      refuse("attention_dropout", "must be 0: dropout of attention is not built for this kind of model");
    read_window(config);
    read_rope(config);
    return config;
  }

  void read_window(LlamaConfig& config) {
    if (type_ == "llama") return;
    const bool is_qwen = type_ != "mistral";
    bool uses_window = !is_qwen;
    if (is_qwen) reader_.boolean("use_sliding_window", uses_window, "");
    // Older files of Mistral say "no window" with null, while a key that is left out means 4096.
    std::int64_t window = 4096, first = 28;
    reader_.integer("sliding_window", window, {.least = 1, .most = std::int64_t{1} << 20}, "");
    if (has_null("sliding_window")) window = 0;
    if (is_qwen) reader_.integer("max_window_layers", first, {.least = 0, .most = 10'000}, "");
    config.sliding_window = uses_window ? window : 0;
    config.max_window_layers = is_qwen && config.sliding_window > 0 ? first : 0;
    if (const JsonNode* types = is_qwen ? child_of(root_, "layer_types") : nullptr) check_layer_types(*types, config);
  }

  bool has_null(const std::string& key) const { return std::ranges::find(nulls_, key) != nulls_.end(); }

  /// Checks that the list, with one word for each layer, agrees with max_window_layers.
  void check_layer_types(const JsonNode& types, const LlamaConfig& config) {
    for (std::size_t layer = 0; layer < types.children.size(); ++layer) {
      const JsonNode& each = types.children[layer];
      const bool slides = config.sliding_window > 0 && static_cast<std::int64_t>(layer) >= config.max_window_layers;
      if (each.value.is_string() && each.value.get<std::string>() == (slides ? "sliding_attention" : "full_attention"))
        continue;
      return refuse("layer_types",
                    fmt::format("layer {} is {}, and use_sliding_window and max_window_layers say something else",
                                layer, describe(each)));
    }
  }

  /// Reads the rotary embedding: "rope_theta" and "rope_scaling" in files up to transformers 4, or "rope_parameters",
  /// which has both.
  void read_rope(LlamaConfig& config) {
    const NumberRule above_zero{.least_excluded = true};
    reader_.number("rope_theta", config.rope.theta, above_zero, "");
    known_.push_back("rope_scaling");
    known_.push_back("rope_parameters");
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      const JsonNode* node = child_of(root_, key);
      if (node == nullptr) continue;
      if (!node->is_object()) return refuse(key, "must be an object, got " + describe(*node));
      const JsonNode members = without_nulls(*node);
      ConfigReader reader(members, diagnostics_, std::string("/") + key);
      const std::vector<std::string> types = {"default", "linear", "llama3"};
      reader.word("type", config.rope.type, types, "");
      reader.word("rope_type", config.rope.type, types, "");
      reader.number("rope_theta", config.rope.theta, above_zero, "");
      if (config.rope.type == "default") {
        reader.finish();
        continue;
      }
      reader.number("factor", config.rope.factor, above_zero, "");
      if (child_of(members, "factor") == nullptr) reader.require(false, "factor", {}, "is needed, but not there");
      if (config.rope.type == "llama3") {
        reader.number("low_freq_factor", config.rope.low_freq_factor, above_zero, "");
        reader.number("high_freq_factor", config.rope.high_freq_factor, above_zero, "");
        config.rope.original_positions = config.max_position_embeddings;
        reader.integer("original_max_position_embeddings", config.rope.original_positions,
                       {.least = 1, .most = std::int64_t{1} << 20}, "");
        for (const char* needed : {"low_freq_factor", "high_freq_factor"})
          if (child_of(members, needed) == nullptr) reader.require(false, needed, {}, "is needed, but not there");
      }
      reader.finish();
    }
  }

  const JsonNode& root_;
  const std::vector<std::string> nulls_;
  Diagnostics& diagnostics_;
  ConfigReader reader_;
  std::string type_;
  std::vector<std::string> known_;
};

nlohmann::ordered_json hugging_face_json(const GPTConfig& c) {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", c.vocab_size},
          {"n_positions", c.seq_len},
          {"n_embd", c.width},
          {"n_layer", c.layers},
          {"n_head", c.heads},
          {"n_inner", c.mlp_ratio * c.width},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", c.norm_eps},
          {"resid_pdrop", c.dropout},
          {"embd_pdrop", c.dropout},
          {"attn_pdrop", c.dropout},
          {"tie_word_embeddings", c.tie_head}};
}

struct Family {
  const char* type;
  const char* architecture;
};

/// Returns the model type that has all features of `c`.
absl::StatusOr<Family> family_of(const LlamaConfig& c) {
  const auto none = [](const std::string& what) {
    return make_error(ExitCode::kConfig, "model: no model type of Hugging Face that is known here has " + what +
                                             ". [T0357] hint: keep checkpoints of Tessera, or change the model file");
  };
  if (c.qk_norm) {
    if (c.qkv_bias || c.mlp_bias) return none("qk_norm together with qkv_bias or mlp_bias");
    return Family{"qwen3", "Qwen3ForCausalLM"};
  }
  if (c.qkv_bias) {
    if (c.mlp_bias) return none("qkv_bias together with mlp_bias");
    return Family{"qwen2", "Qwen2ForCausalLM"};
  }
  if (c.sliding_window > 0) {
    if (c.attention_bias || c.mlp_bias || c.max_window_layers > 0)
      return none(
          "sliding_window together with attention_bias, mlp_bias or max_window_layers, but not qk_norm or qkv_bias");
    return Family{"mistral", "MistralForCausalLM"};
  }
  if (c.hidden_size % c.num_attention_heads != 0)
    return none("a hidden_size that is no multiple of num_attention_heads");
  return Family{"llama", "LlamaForCausalLM"};
}

absl::StatusOr<nlohmann::ordered_json> hugging_face_json(const LlamaConfig& c) {
  TESSERA_ASSIGN_OR_RETURN(const Family family, family_of(c));
  const std::string type = family.type;
  nlohmann::ordered_json json = {{"architectures", {family.architecture}},
                                 {"model_type", type},
                                 {"vocab_size", c.vocab_size},
                                 {"hidden_size", c.hidden_size},
                                 {"intermediate_size", c.intermediate_size},
                                 {"num_hidden_layers", c.num_hidden_layers},
                                 {"num_attention_heads", c.num_attention_heads},
                                 {"num_key_value_heads", c.key_value_heads()},
                                 {"head_dim", c.head_size()},
                                 {"hidden_act", "silu"},
                                 {"max_position_embeddings", c.max_position_embeddings},
                                 {"rms_norm_eps", c.rms_norm_eps},
                                 {"initializer_range", c.initializer_range},
                                 {"attention_dropout", 0.0},
                                 {"rope_theta", c.rope.theta}};
  if (c.rope.type != "default") json["rope_scaling"] = {{"rope_type", c.rope.type}, {"factor", c.rope.factor}};
  if (c.rope.type == "llama3") {
    json["rope_scaling"]["low_freq_factor"] = c.rope.low_freq_factor;
    json["rope_scaling"]["high_freq_factor"] = c.rope.high_freq_factor;
    json["rope_scaling"]["original_max_position_embeddings"] = c.rope.original_positions;
  }
  if (type == "llama") {
    json["attention_bias"] = c.attention_bias;
    json["mlp_bias"] = c.mlp_bias;
  } else if (type == "mistral") {
    json["sliding_window"] = c.sliding_window;
  } else {
    if (type == "qwen3") json["attention_bias"] = c.attention_bias;
    json["use_sliding_window"] = c.sliding_window > 0;
    json["sliding_window"] = c.sliding_window > 0 ? nlohmann::ordered_json(c.sliding_window) : nlohmann::ordered_json();
    json["max_window_layers"] = c.sliding_window > 0 ? c.max_window_layers : c.num_hidden_layers;
  }
  json["tie_word_embeddings"] = c.tie_word_embeddings;
  return json;
}

}  // namespace

absl::StatusOr<HfConfig> parse_hf_config(const std::string& text, const std::string& name) {
  Diagnostics diagnostics(name, text);
  HfConfig result;
  if (const auto root = parse_json(text, diagnostics)) {
    if (root->is_object()) {
      const JsonNode members = without_nulls(*root);
      std::vector<std::string> nulls;
      for (const JsonNode& child : root->children)
        if (child.value.is_null()) nulls.push_back(child.key);
      result = HfReader(members, std::move(nulls), diagnostics).read();
    } else {
      diagnostics.add(root->offset, "", "must be an object, got " + describe(*root));
    }
  }
  TESSERA_RETURN_IF_ERROR(diagnostics.to_status("[T0358] hint: docs/huggingface.md says which models are understood"));
  // The configuration is checked as a model file is, with the same limit on the number of all parameters.
  const auto checked = parse_model_config(to_json(result.config), name);
  if (!checked.ok()) return checked.status();
  return result;
}

absl::StatusOr<ModelConfig> read_hf_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           read_input_file_in(folder, "config.json", "model file", kMostFileBytes));
  TESSERA_ASSIGN_OR_RETURN(HfConfig read, parse_hf_config(text, path.string()));
  if (!read.unknown.empty())
    log_warning(path.string() + ": keys that are not known here are left out: " + clipped(joined(read.unknown), 1000));
  return std::move(read.config);
}

absl::StatusOr<std::string> to_hf_config(const ModelConfig& config, const std::string& torch_dtype) {
  absl::StatusOr<nlohmann::ordered_json> json;
  if (const auto* gpt = std::get_if<GPTConfig>(&config)) {
    json = hugging_face_json(*gpt);
    if (!gpt->bias)
      return make_error(ExitCode::kConfig,
                        "model: GPT-2 of Hugging Face has biases in its linear layers, and \"bias\" is false. [T0359] "
                        "hint: train with \"bias\": true");
  } else {
    json = hugging_face_json(std::get<LlamaConfig>(config));
  }
  if (!json.ok()) return json.status();
  (*json)["torch_dtype"] = torch_dtype;
  return json->dump(2) + "\n";
}

}  // namespace tessera::models
