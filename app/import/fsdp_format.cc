// FSDP's keys, as Accelerate's files have them ("fsdp_sharding_strategy" in "fsdp_config") and as transformers' have them
// ("sharding_strategy" or "fsdp_sharding_strategy", alone or in "fsdp_config"). Rows call both "fsdp.sharding_strategy".

#include <algorithm>
#include <array>

#include "app/import/import_formats.h"
#include "runtime/base/text.h"

namespace tessera::app {
namespace {

constexpr std::array kShardings = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"};
constexpr char kTransformerWrap[] = "transformer_based_wrap", kSizeWrap[] = "size_based_wrap", kNoWrap[] = "no_wrap";

// The name of a strategy of FSDP, which files also give by its number from 1 on; empty: it is none.
std::string sharding_of(const JsonNode& node) {
  const std::optional<std::int64_t> number = integer_of(node);
  if (number)
    return *number >= 1 && *number <= static_cast<std::int64_t>(kShardings.size())
               ? kShardings[static_cast<std::size_t>(*number - 1)]
               : "";
  std::string word = word_of(node);
  if (word.starts_with("_")) word.erase(0, 1);
  return std::find(kShardings.begin(), kShardings.end(), word) == kShardings.end() ? "" : word;
}

std::string upper(std::string text) {
  for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return text;
}

bool is_replicated(const ImportSession& session) {
  const JsonNode* replicas = session.find("accelerate.parallelism_config.parallelism_config_dp_replicate_size");
  return replicas != nullptr && integer_of(*replicas).value_or(1) > 1;
}

void put_sharding(ImportSession& session, const ConfigKey& key, const std::string& name) {
  if (name == "hybrid_shard_zero2")
    return session.refused(key,
                           "use \"strategy\": \"SHARD_GRAD_OP\" with \"mesh\": {\"replicate\": HOSTS}, which is the "
                           "same; or HYBRID_SHARD, which needs less "
                           "memory and gathers once more");
  if (name.empty())
    return session.refused(key, "must be FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD, or a number from 1 to 4");
  const bool hybrid = name == "full_shard" && is_replicated(session);
  session.put(key, "/strategy", hybrid ? "HYBRID_SHARD" : upper(name),
              hybrid ? "parallelism_config makes it hybrid" : "");
}

// Which of its two keys FSDP reads; version 2 knows reshard_after_forward only.
bool reads_reshard(const ImportSession& session) {
  const JsonNode* reshard = session.find("fsdp.reshard_after_forward");
  if (reshard == nullptr) return false;
  const JsonNode* version = session.find("fsdp.version");
  if (session.find("fsdp.sharding_strategy") == nullptr) return true;
  return version != nullptr ? integer_of(*version) == 2 : bool_of(*reshard).has_value();
}

void sharding_strategy(ImportSession& session, const ConfigKey& key) {
  if (reads_reshard(session)) return session.ignored(key, "FSDP 2 reads reshard_after_forward in its place");
  put_sharding(session, key, sharding_of(*key.node));
}

void reshard_after_forward(ImportSession& session, const ConfigKey& key) {
  if (!reads_reshard(session)) return session.ignored(key, "FSDP 1 reads sharding_strategy in its place");
  const std::optional<bool> reshard = bool_of(*key.node);
  if (reshard) return put_sharding(session, key, *reshard ? "full_shard" : "shard_grad_op");
  put_sharding(session, key, sharding_of(*key.node));
}

// The words of TrainingArguments' "fsdp": "full_shard auto_wrap".
void fsdp_options(ImportSession& session, const ConfigKey& key) {
  if (key.node->value.is_boolean()) return session.ignored(key, "fsdp_config says what FSDP does");
  std::vector<std::string> words;
  for (std::string name : names_of(*key.node).value_or(std::vector<std::string>{""})) {
    for (std::size_t space; (space = name.find(' ')) != std::string::npos; name.erase(0, space + 1))
      words.push_back(name.substr(0, space));
    words.push_back(name);
  }
  std::string sharding;
  for (const std::string& word : words) {
    if (word == "offload") return session.refused(key, kHostTierByHand);
    const bool is_sharding = std::find(kShardings.begin(), kShardings.end(), word) != kShardings.end();
    if (is_sharding) sharding = word;
    if (!is_sharding && !word.empty() && word != "auto_wrap")
      return session.refused(key, "the word " + quoted_text(word) + " is unknown");
  }
  const bool elsewhere =
      session.find("fsdp.sharding_strategy") != nullptr || session.find("fsdp.reshard_after_forward") != nullptr;
  if (sharding.empty() || elsewhere) return session.ignored(key, "the other keys say what FSDP does");
  put_sharding(session, key, sharding);
}

void version(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> number = integer_of(*key.node);
  if (number != 1 && number != 2) return session.refused(key, "must be 1 or 2");
  session.ignored(key, "Tessera has one implementation; the version says how FSDP reads the other keys");
}

bool has_classes(const ImportSession& session) {
  const JsonNode* classes = session.find("fsdp.transformer_layer_cls_to_wrap");
  return classes != nullptr && !names_of(*classes).value_or(std::vector<std::string>{}).empty();
}

std::int64_t least_parameters(const ImportSession& session) {
  const JsonNode* least = session.find("fsdp.min_num_params");
  return least == nullptr ? 0 : integer_of(*least).value_or(0);
}

// Where the file says no policy, the other keys do.
std::string wrap_policy(const ImportSession& session) {
  if (const JsonNode* policy = session.find("fsdp.auto_wrap_policy")) return word_of(*policy);
  if (has_classes(session)) return kTransformerWrap;
  return least_parameters(session) > 0 ? kSizeWrap : kNoWrap;
}

void auto_wrap_policy(ImportSession& session, const ConfigKey& key) {
  const std::string policy = wrap_policy(session);
  if (policy == kTransformerWrap && has_classes(session)) return session.mapped(key, "units.classes");
  if (policy == kTransformerWrap)
    return session.ignored(key,
                           "the file names no class, so the training program asks the model. TesseraTrainer does so "
                           "too; elsewhere set units.classes");
  if (policy == kSizeWrap && least_parameters(session) > 0) return session.mapped(key, "units.min_numel");
  if (policy == kSizeWrap || policy == kNoWrap)
    return session.ignored(key, "no units: the whole model is one, as in FSDP");
  session.refused(key, "must be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP");
}

void classes_to_wrap(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::vector<std::string>> names = names_of(*key.node);
  if (!names) return session.refused(key, "must be a list of names, or names with commas between them");
  if (wrap_policy(session) != kTransformerWrap || names->empty())
    return session.ignored(key, "it counts with TRANSFORMER_BASED_WRAP only");
  session.put(key, "/units/classes", *names);
}

void min_num_params(ImportSession& session, const ConfigKey& key) {
  const std::optional<std::int64_t> least = integer_of(*key.node);
  if (!least || *least < 0) return session.refused(key, "must be an integer of at least 0");
  if (wrap_policy(session) != kSizeWrap || *least == 0)
    return session.ignored(key, "it counts with SIZE_BASED_WRAP only, and above 0");
  session.put(key, "/units/min_numel", *least);
}

void backward_prefetch(ImportSession& session, const ConfigKey& key) {
  const std::string word = word_of(*key.node);
  const std::optional<std::int64_t> number = integer_of(*key.node);
  if (word == "no_prefetch" && session.is_on("fsdp.forward_prefetch"))
    return session.ignored(key, "forward_prefetch asks for prefetch 1");
  if (word == "no_prefetch" || number == 3) {
    session.put(key, "/prefetch", 0);
    return;
  }
  if (word == "backward_pre" || number == 1) {
    session.put(key, "/prefetch", 1);
    return;
  }
  if (word == "backward_post" || number == 2) {
    session.put(key, "/prefetch", 1,
                "Difference: FSDP then gathers after a unit's gradients are made, and Tessera while they are");
    return;
  }
  session.refused(key, "must be BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH");
}

void forward_prefetch(ImportSession& session, const ConfigKey& key) {
  const std::optional<bool> on = bool_of(*key.node);
  if (!on) return session.refused(key, "must be true or false");
  if (!*on) return session.ignored(key, "prefetch holds for forward and backward alike, and training is the same");
  session.put(key, "/prefetch", 1);
}

constexpr char kFsdpRecompute[] =
    "recomputation is the program's: it calls tessera::checkpoint (tessera/recompute.h), or "
    "gradient_checkpointing_enable() of a model of "
    "transformers. Without it activations need more memory";

ImportRow not_offloaded(const std::string& name) { return expects(name, false, "not offloaded", kHostTierByHand); }

std::vector<ImportRow> wrap_rows() {
  return {
      by_rule("fsdp.auto_wrap_policy",
              "TRANSFORMER_BASED_WRAP: `units.classes`; SIZE_BASED_WRAP: `units.min_numel`; NO_WRAP: ignored, as the "
              "whole model is then one unit",
              auto_wrap_policy),
      by_rule("fsdp.transformer_layer_cls_to_wrap", "`units.classes`", classes_to_wrap),
      by_rule("fsdp.min_num_params", "`units.min_numel`, with SIZE_BASED_WRAP", min_num_params),
      refuses("fsdp.ignored_modules",
              "every parameter of the module is the Engine's. Keep such modules outside of the one that it gets"),
  };
}

void fsdp_policy_type(ImportSession& session, const ConfigKey& key, const std::string& pointer) {
  std::string word = word_of(*key.node);
  if (word.starts_with("torch.")) word.erase(0, 6);
  const std::string dtype = word == "float32" || word == "fp32"    ? "fp32"
                            : word == "bfloat16" || word == "bf16" ? "bf16"
                            : word == "float16" || word == "fp16"  ? "fp16"
                                                                   : "";
  if (dtype.empty()) return session.refused(key, "must be fp32, bf16 or fp16");
  session.put(key, pointer, dtype);
}

std::vector<ImportRow> fsdp_precision_rows() {
  const std::string policy = "fsdp.mixed_precision_policy";
  return {
      by_rule(policy, "`mixed_precision.param` and `mixed_precision.reduce`",
              [](ImportSession& session, const ConfigKey& key) {
                fsdp_policy_type(session, key, "/mixed_precision/param");
                if (session.is_set("/mixed_precision/param"))
                  session.imply("/mixed_precision/reduce", session.settings().at("/mixed_precision/param"),
                                "FSDP takes one type for both");
              }),
      by_rule(policy + ".param_dtype", "`mixed_precision.param`",
              [](ImportSession& session, const ConfigKey& key) {
                fsdp_policy_type(session, key, "/mixed_precision/param");
              }),
      by_rule(policy + ".reduce_dtype", "`mixed_precision.reduce`",
              [](ImportSession& session, const ConfigKey& key) {
                fsdp_policy_type(session, key, "/mixed_precision/reduce");
              }),
      ignores(policy + ".buffer_dtype", "buffers keep the type that the program gives them"),
      ignores(policy + ".output_dtype", "the program gives outputs the type that it wants"),
      ignores(policy + ".cast_forward_inputs", "the program gives forward inputs of the type that it wants"),
  };
}

}  // namespace

std::vector<ImportRow> fsdp_rows() {
  const std::string sharding =
      "`strategy`: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, or 1 to 4; HYBRID_SHARD_ZERO2 (5) is refused: "
      "SHARD_GRAD_OP with mesh.replicate "
      "is the same";
  return std::vector<ImportRow>{
             by_rule("fsdp.version", "ignored: it says how the other keys are read", version),
             by_rule("fsdp.sharding_strategy", sharding, sharding_strategy),
             by_rule("fsdp.reshard_after_forward",
                     "true: `strategy` \"FULL_SHARD\"; false: \"SHARD_GRAD_OP\"; a name: as sharding_strategy",
                     reshard_after_forward),
         } +
         wrap_rows() + fsdp_precision_rows() +
         std::vector<ImportRow>{
             by_rule("fsdp.backward_prefetch", "BACKWARD_PRE, BACKWARD_POST: `prefetch` 1; NO_PREFETCH: `prefetch` 0",
                     backward_prefetch),
             by_rule("fsdp.forward_prefetch", "true: `prefetch` 1; false: ignored", forward_prefetch),
             ignores("fsdp.limit_all_gathers", "at most prefetch + 1 units are gathered at a time, always"),
             ignores("fsdp.use_orig_params", "parameters stay those of the module, always"),
             ignores("fsdp.sync_module_states", "all ranks get rank 0's values, always"),
             ignores("fsdp.cpu_ram_efficient_loading",
                     "deferred_init makes no rank hold the model, and import_safetensors reads files on rank 0"),
             not_offloaded("fsdp.offload_params"),
             not_offloaded("fsdp.cpu_offload"),
             ignores("fsdp.state_dict_type",
                     "a checkpoint loads under every strategy; export_safetensors writes full weights"),
             ignores("fsdp.final_state_dict_type", "export_safetensors writes full weights"),
             expects("fsdp.activation_checkpointing", false, "off", kFsdpRecompute),
             expects("fsdp.activation_checkpointing_offload", false, "off",
                     "training on a GPU, set offload.activations.tier \"host\"; recomputation itself is the program's"),
             ignores("fsdp.activation_checkpoint_reentrant", "recomputation is the program's"),
             expects("fsdp.xla", false, "off", "Tessera trains on CPUs and NVIDIA GPUs"),
             expects("fsdp.xla_fsdp_v2", false, "off", "Tessera trains on CPUs and NVIDIA GPUs"),
             expects("fsdp.xla_fsdp_grad_ckpt", false, "off", "Tessera trains on CPUs and NVIDIA GPUs"),
             ignores("fsdp.xla_fsdp_settings.*", "it counts on TPUs only"),
         };
}

void finish_fsdp(ImportSession& session) {
  if (is_replicated(session))
    session.imply("/strategy", "HYBRID_SHARD",
                  "parallelism_config replicates, and FSDP's default is to shard everything");
  const auto strategy = session.settings().find("/strategy");
  const bool shards = strategy == session.settings().end() || strategy->second != "NO_SHARD";
  if (shards && !session.is_set("/units/classes") && !session.is_set("/units/min_numel")) session.note(kUnitsNote);
  session.note(
      "Optimizer, learning rate, clipping and schedule are the training program's. Say them in the strategy's "
      "\"optimizer\", \"gradient_clipping\" and "
      "\"lr_schedule\"; TesseraTrainer takes them from TrainingArguments.");
}

std::string fsdp_row_name(const std::string& key) {
  std::string name = key.starts_with("fsdp_config.") ? key.substr(12) : key;
  if (name.starts_with("fsdp_")) name.erase(0, 5);
  return "fsdp." + name;
}

ImportFormat fsdp_format() {
  ImportFormat format = {"fsdp", "an fsdp_config of transformers", fsdp_rows(),
                         [](const std::string& path) {
                           if (path == "fsdp" || path == "fsdp_config") return path;
                           return fsdp_row_name(path);
                         },
                         [](ImportSession& session) {
                           finish_fsdp(session);
                           if (!session.is_set("/mixed_precision/param"))
                             session.note(
                                 "Types are the training program's too: with bf16=True set \"mixed_precision\": "
                                 "{\"param\": \"bf16\", \"reduce\": \"bf16\"}.");
                         }};
  for (ImportRow& row : format.rows) row.shown = row.name.substr(5);
  format.rows.push_back(by_rule("fsdp",
                                "the words full_shard, shard_grad_op, no_shard, hybrid_shard: `strategy`, unless "
                                "fsdp_config says it; auto_wrap: ignored; offload: refused",
                                fsdp_options));
  format.rows.push_back(
      by_rule("fsdp_config", "its keys are those of this table", [](ImportSession& session, const ConfigKey& key) {
        if (key.node->is_object()) return session.ignored(key, "an empty section: nothing is said");
        session.refused(key, "must be an object with keys of its own");
      }));
  return format;
}

}  // namespace tessera::app
