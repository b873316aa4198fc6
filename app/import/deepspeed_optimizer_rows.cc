// DeepSpeed: "optimizer".

#include <algorithm>
#include <map>

#include "app/import/import_formats.h"
#include "runtime/base/text.h"

namespace tessera::app {
namespace {

using Strings = std::vector<std::string>;

constexpr char kOptimizerParams[] = "optimizer.params.";

// An optimizer of DeepSpeed's, or of torch.optim, that Tessera has; and those of its defaults that are not torch.optim's, or that Tessera 0.1
// had otherwise. The strategy says them all.
struct KnownOptimizer {
  std::string name;  ///< lower case
  std::string type;  ///< of Tessera; adam depends on adam_w_mode too
  std::map<std::string, nlohmann::json> defaults;
};

const std::vector<KnownOptimizer>& known_optimizers() {
  static const std::vector<KnownOptimizer> known = {
      {"adam", "adamw", {{"weight_decay", 0.0}}},
      {"adamw", "adamw", {{"weight_decay", 0.0}}},
      {"sgd", "sgd", {{"weight_decay", 0.0}}},
      {"lion", "lion", {{"weight_decay", 0.0}, {"lr", 0.001}, {"betas", {0.9, 0.99}}}},
      {"adagrad", "adagrad", {{"weight_decay", 0.0}, {"lr", 0.01}, {"eps", 1e-10}}},
      {"rmsprop", "rmsprop", {{"weight_decay", 0.0}, {"lr", 0.01}}},
  };
  return known;
}

constexpr char kOneBit[] =
    "it compresses momentum. Use \"AdamW\"; in the strategy, NO_SHARD on CPUs with compression {\"one_bit\": true, "
    "\"one_bit_momentum\": betas[0], \"start_step\": N} and optimizer {\"freeze_step\": N} is close to OneBitAdam";
constexpr char kMup[] =
    "muP gives each parameter a rate by its width. Use \"AdamW\" or \"SGD\" with optimizer.groups, which have an "
    "lr_ratio";

// Optimizers that are known and refused, with what to use instead.
const std::map<std::string, std::string>& refused_optimizers() {
  static const std::map<std::string, std::string> refused = {
      {"onebitadam", kOneBit},
      {"zerooneadam", kOneBit},
      {"onebitlamb", kOneBit},
      {"muadam", kMup},
      {"muadamw", kMup},
      {"musgd", kMup},
      {"lamb",
       "DeepSpeed keeps LAMB's ratio of norms between min_coeff and max_coeff (0.01 and 10), and Tessera does not. If "
       "that is fine, set optimizer "
       "{\"type\": \"lamb\"} in the strategy"},
      {"muon",
       "DeepSpeed's Muon updates the parameters that the program marks with use_muon, and Tessera's all matrices but "
       "those of embeddings. If that is "
       "fine, set optimizer {\"type\": \"muon\", \"muon\": {\"adjust_lr\": \"original\"}} in the strategy"},
  };
  return refused;
}

const KnownOptimizer* optimizer_of(const ImportSession& session) {
  const JsonNode* type = session.find("optimizer.type");
  if (type == nullptr) return nullptr;
  const auto& known = known_optimizers();
  const auto found =
      std::find_if(known.begin(), known.end(), [&](const KnownOptimizer& each) { return each.name == word_of(*type); });
  return found == known.end() ? nullptr : &*found;
}

// DeepSpeed's Adam decouples weight decay too, unless adam_w_mode is false.
std::string tessera_type(const ImportSession& session, const KnownOptimizer& optimizer) {
  const JsonNode* mode = session.find("optimizer.params.adam_w_mode");
  return optimizer.name == "adam" && mode != nullptr && bool_of(*mode) == false ? "adam" : optimizer.type;
}

void optimizer_type(ImportSession& session, const ConfigKey& key) {
  if (const KnownOptimizer* known = optimizer_of(session)) {
    const std::string type = tessera_type(session, *known);
    const bool renamed = known->name == "adam" && type == "adamw";
    session.put(
        key, "/optimizer/type", type,
        renamed ? "DeepSpeed's \"Adam\" decouples weight decay as AdamW does, unless adam_w_mode is false" : "");
    return;
  }
  const auto refused = refused_optimizers().find(word_of(*key.node));
  if (refused != refused_optimizers().end()) return session.refused(key, refused->second);
  Strings names;
  for (const KnownOptimizer& each : known_optimizers()) names.push_back(each.name);
  session.refused(key, "Tessera has no such optimizer" + did_you_mean(word_of(*key.node), names) +
                           "; it has adamw, adam, sgd, lion, adagrad, rmsprop, muon, lamb and lars, adafactor "
                           "without its parameters taken over, and rules of the program's own "
                           "(optimizer.type \"own\" and \"own_matrix\")");
}

using Rule = std::function<void(ImportSession&, const ConfigKey&)>;

// A number that some optimizers have.
ImportRow of_optimizers(const Strings& names, const std::string& param, const std::string& doc, const Rule& rule) {
  return by_rule(kOptimizerParams + param, doc + " (" + joined(names) + ")",
                 [names, rule](ImportSession& session, const ConfigKey& key) {
                   const KnownOptimizer* optimizer = optimizer_of(session);
                   if (optimizer == nullptr)
                     return session.ignored(key, "follows optimizer.type, which is not taken over");
                   if (std::find(names.begin(), names.end(), optimizer->name) == names.end())
                     return session.refused(key, "optimizer.type " + optimizer->name + " has no such parameter");
                   rule(session, key);
                 });
}

ImportRow number(const Strings& names, const std::string& param) {
  const ImportRow plain = sets(param, "/optimizer/" + param);
  return of_optimizers(names, param, plain.doc, plain.apply);
}

ImportRow flag(const Strings& names, const std::string& param, const nlohmann::json& value, const std::string& why,
               const std::string& refusal) {
  const ImportRow plain = expects(param, value, why, refusal);
  return of_optimizers(names, param, plain.doc, plain.apply);
}

ImportRow no_matter(const Strings& names, const std::string& param) {
  const ImportRow plain = ignores(param, "it does not change the update");
  return of_optimizers(names, param, plain.doc, plain.apply);
}

void learning_rate(ImportSession& session, const ConfigKey& key) {
  const nlohmann::json peak = deepspeed_scheduler_peak(session);
  if (!peak.is_null() && peak.get<double>() != number_of(*key.node))
    return session.ignored(key, "the scheduler's warmup_max_lr is the rate after warm-up, in place of this one");
  sets("", "/optimizer/lr").apply(session, key);
}

void adam_w_mode(ImportSession& session, const ConfigKey& key) {
  const bool adamw = optimizer_of(session)->name == "adamw";
  session.ignored(key, adamw ? "AdamW is AdamW, whatever this says" : "optimizer.type says which of the two it is");
}

void nesterov(ImportSession& session, const ConfigKey& key) {
  const std::optional<bool> on = bool_of(*key.node);
  if (!on) return session.refused(key, "must be true or false");
  session.put(key, "/optimizer/nesterov", *on);
}

void centered(ImportSession& session, const ConfigKey& key) {
  const std::optional<bool> on = bool_of(*key.node);
  if (!on) return session.refused(key, "must be true or false");
  session.put(key, "/optimizer/centered", *on);
}

}  // namespace

std::vector<ImportRow> deepspeed_optimizer_rows() {
  const Strings adam = {"adam", "adamw"}, all = {"adam", "adamw", "sgd", "lion", "adagrad", "rmsprop"};
  return {
      by_rule("optimizer.type",
              "AdamW, and Adam unless adam_w_mode is false: `optimizer.type` \"adamw\"; Adam with adam_w_mode false: "
              "\"adam\"; SGD, Lion, Adagrad, "
              "RMSprop: the same. Refused: Lamb (bounds of its ratio), Muon (which parameters it updates), 1-bit and "
              "muP optimizers, and all others",
              optimizer_type),
      ignores("optimizer.legacy_fusion", "it chooses between two implementations"),
      of_optimizers(all, "lr", "`optimizer.lr`, unless the scheduler has a warmup_max_lr", learning_rate),
      number(all, "weight_decay"),
      number({"adam", "adamw", "lion"}, "betas"),
      number({"adam", "adamw", "adagrad", "rmsprop"}, "eps"),
      number({"sgd", "rmsprop"}, "momentum"),
      number({"sgd"}, "dampening"),
      of_optimizers({"sgd"}, "nesterov", "`optimizer.nesterov`", nesterov),
      number({"rmsprop"}, "alpha"),
      of_optimizers({"rmsprop"}, "centered", "`optimizer.centered`", centered),
      number({"adagrad"}, "lr_decay"),
      of_optimizers(adam, "adam_w_mode", "part of `optimizer.type`", adam_w_mode),
      flag(adam, "bias_correction", true, "Tessera corrects the bias too",
           "Tessera always corrects the bias of the moments"),
      flag({"adam", "adamw", "adagrad"}, "amsgrad", false, "off",
           "Tessera has no AMSGrad. Use AdamW, or optimizer.type \"own\" with a rule of the program's"),
      flag(adam, "fp32_optimizer_states", true, "optimizer states are fp32",
           "set optimizer.state_dtype \"bf16\" instead: Tessera rounds such states stochastically, DeepSpeed to "
           "nearest"),
      flag({"adagrad"}, "initial_accumulator_value", 0.0, "Tessera's sums begin at 0 too", "Tessera's sums begin at 0"),
      flag(all, "maximize", false, "off", "Tessera only minimizes: give backward the loss with the other sign"),
      no_matter(adam, "torch_adam"),
      no_matter({"adam", "adamw", "lion"}, "set_grad_none"),
      no_matter(all, "fused"),
      no_matter(all, "foreach"),
      no_matter(all, "capturable"),
      no_matter(all, "differentiable"),
      refuses("optimizer.params.max_grad_norm", "the optimizer does not clip. Use gradient_clipping"),
      by_rule("optimizer.params.*", "refused, but ignored where `optimizer.type` is refused",
              [](ImportSession& session, const ConfigKey& key) {
                const KnownOptimizer* optimizer = optimizer_of(session);
                if (optimizer == nullptr)
                  return session.ignored(key, "follows optimizer.type, which is not taken over");
                session.refused(key, "unknown parameter of optimizer.type " + optimizer->name);
              }),
  };
}

void finish_deepspeed_optimizer(ImportSession& session) {
  if (session.find("optimizer.type") == nullptr) {
    session.note(
        "The file names no optimizer, so the program makes one. Say in the strategy's \"optimizer\" which it is; the "
        "default is adamw with a "
        "learning rate of 0.001 and a weight decay of 0.01.");
    return;
  }
  const nlohmann::json peak = deepspeed_scheduler_peak(session);
  if (!peak.is_null())
    session.imply("/optimizer/lr", peak, "the scheduler's warmup_max_lr; DeepSpeed's default is 0.001");
  const KnownOptimizer* optimizer = optimizer_of(session);
  if (optimizer == nullptr) return;
  for (const auto& [name, value] : optimizer->defaults) {
    if (session.is_auto(kOptimizerParams + name)) continue;
    const bool of_torch = session.is_on("optimizer.params.torch_adam") && tessera_type(session, *optimizer) == "adamw";
    if (name == "weight_decay" && of_torch) {
      session.imply("/optimizer/weight_decay", 0.01, "the default of torch.optim.AdamW");
    } else {
      session.imply("/optimizer/" + name, value, "the default of " + optimizer->name + " in DeepSpeed");
    }
  }
}

}  // namespace tessera::app
