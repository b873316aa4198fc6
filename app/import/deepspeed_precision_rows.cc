// DeepSpeed: types of parameters and gradients, and loss scaling.

#include <cmath>

#include "app/import/import_formats.h"

namespace tessera::app {
namespace {

constexpr char kParam[] = "/mixed_precision/param";
constexpr char kReduce[] = "/mixed_precision/reduce";
constexpr char kScale[] = "/mixed_precision/loss_scale/";
constexpr char kOff[] = "fp16 is not enabled, so the loss is not scaled";
constexpr char kFixed[] = "fp16.loss_scale gives a fixed scale";
constexpr double kLargestPower = 32;

bool has_fixed_scale(const ImportSession& session) {
  const JsonNode* scale = session.find("fp16.loss_scale");
  return scale != nullptr && number_of(*scale).value_or(0) > 0;
}

// Of keys that DeepSpeed reads only where the scale follows the gradients. True: the key was ignored.
bool has_no_effect(ImportSession& session, const ConfigKey& key) {
  if (!deepspeed_trains_in(session, "fp16")) {
    session.ignored(key, kOff);
    return true;
  }
  if (has_fixed_scale(session)) session.ignored(key, kFixed);
  return has_fixed_scale(session);
}

void enable(ImportSession& session, const ConfigKey& key, const std::string& dtype) {
  const std::optional<bool> on = bool_of(*key.node);
  if (!on) return session.refused(key, "must be true or false");
  if (!*on) return session.ignored(key, "off");
  const bool both = deepspeed_trains_in(session, "fp16") && deepspeed_trains_in(session, "bf16");
  if (both) return session.refused(key, "fp16 and bf16 are both enabled. Enable one of them");
  session.put(key, kParam, dtype);
}

void loss_scale(ImportSession& session, const ConfigKey& key) {
  if (!deepspeed_trains_in(session, "fp16")) return session.ignored(key, kOff);
  const std::optional<double> scale = number_of(*key.node);
  if (!scale || *scale < 0)
    return session.refused(key, "must be 0, for a scale that follows the gradients, or above 0");
  if (*scale == 0) {
    session.put(key, std::string(kScale) + "dynamic", true);
  } else if (session.put(key, std::string(kScale) + "initial", *scale, "mixed_precision.loss_scale.dynamic = false")) {
    session.set(std::string(kScale) + "dynamic", false);
  }
}

void initial_power(ImportSession& session, const ConfigKey& key) {
  if (has_no_effect(session, key)) return;
  const std::optional<double> power = number_of(*key.node);
  if (!power || *power < 0 || *power > kLargestPower)
    return session.refused(key, "must be from 0 to 32: Tessera's scale is at most 2^32");
  session.put(key, std::string(kScale) + "initial", std::exp2(*power));
}

void dynamic_scale(ImportSession& session, const ConfigKey& key, const std::string& name, const std::string& more) {
  if (has_no_effect(session, key)) return;
  const std::optional<double> number = number_of(*key.node);
  session.put(key, kScale + name, number ? nlohmann::json(*number) : json_of(*key.node), more);
}

// Without ZeRO the scale falls at every overflow.
bool counts_overflows(const ImportSession& session) {
  if (session.find("accelerate.distributed_type") != nullptr && session.find("zero_optimization.stage") == nullptr)
    return true;  // Accelerate's default is stage 2
  const JsonNode* stage = session.find("zero_optimization.stage");
  return session.is_on("zero_optimization") || (stage != nullptr && number_of(*stage).value_or(0) > 0);
}

void hysteresis(ImportSession& session, const ConfigKey& key) {
  if (has_no_effect(session, key)) return;
  if (!counts_overflows(session))
    return session.ignored(key,
                           "DeepSpeed reads it with stages 1 to 3; without ZeRO its scale falls at every overflow");
  const bool same = number_of(*key.node) == 1.0 || session.is_on("fp16.consecutive_hysteresis");
  dynamic_scale(
      session, key, "hysteresis",
      same ? ""
           : "Difference: Tessera counts overflows in a row, and DeepSpeed also those with finite steps between "
             "them, unless consecutive_hysteresis is true");
}

void consecutive(ImportSession& session, const ConfigKey& key) {
  if (has_no_effect(session, key)) return;
  if (session.is_on(key.name)) return session.ignored(key, "Tessera counts overflows in a row too");
  session.ignored(key, "Tessera counts overflows in a row: fp16.hysteresis says what differs");
}

void communication_type(ImportSession& session, const ConfigKey& key) {
  const std::string dtype = word_of(*key.node);
  if (dtype == "fp16" && !deepspeed_trains_in(session, "fp16"))
    return session.refused(key,
                           "mixed_precision.reduce \"fp16\" needs fp16 parameters, since only then the loss is scaled. "
                           "Use \"bf16\" or \"fp32\"");
  if (dtype != "fp32" && dtype != "bf16" && dtype != "fp16") return session.refused(key, "must be fp32, bf16 or fp16");
  session.put(key, kReduce, dtype);
}

void accumulation_type(ImportSession& session, const ConfigKey& key) {
  const std::string dtype = word_of(*key.node);
  if (dtype == "fp32") return session.ignored(key, "Tessera adds up gradients in fp32 always");
  session.refused(key, "Tessera adds up gradients in fp32 always, in shards. Leave the key out, or set it to fp32");
}

std::vector<ImportRow> fp16_rows() {
  const std::string only = " while fp16 is enabled, and no fixed scale is given";
  return {
      by_rule("fp16.enabled",
              "true: `mixed_precision.param` \"fp16\", and `mixed_precision.reduce` \"fp16\" unless "
              "`communication_data_type` says "
              "another type",
              [](auto& session, const auto& key) { enable(session, key, "fp16"); }),
      ignores("fp16.auto_cast", "the program gives forward inputs of the type that it wants"),
      by_rule(
          "fp16.loss_scale",
          "0: `mixed_precision.loss_scale.dynamic` true; above 0: `dynamic` false and `initial`, while fp16 is enabled",
          loss_scale),
      by_rule("fp16.initial_scale_power", "n: `mixed_precision.loss_scale.initial` 2^n" + only, initial_power),
      by_rule("fp16.loss_scale_window", "`mixed_precision.loss_scale.growth_interval`" + only,
              [](auto& session, const auto& key) { dynamic_scale(session, key, "growth_interval", ""); }),
      by_rule("fp16.hysteresis",
              "`mixed_precision.loss_scale.hysteresis`" + only +
                  "; with the difference that Tessera counts overflows in a row",
              hysteresis),
      by_rule("fp16.consecutive_hysteresis",
              "ignored: true is what Tessera does; false differs as `fp16.hysteresis` says", consecutive),
      by_rule("fp16.min_loss_scale", "`mixed_precision.loss_scale.minimum`" + only,
              [](auto& session, const auto& key) {
                dynamic_scale(
                    session, key, "minimum",
                    "Difference: at the minimum Tessera skips the step, and DeepSpeed with ZeRO ends the run");
              }),
      expects(
          "fp16.fp16_master_weights_and_grads", false, "master weights are fp32",
          "Tessera's master weights are fp32 always. optimizer.state_dtype \"bf16\" or \"8bit\" saves as much memory"),
  };
}

std::vector<ImportRow> bf16_rows(const std::string& section) {
  std::vector<ImportRow> rows = {
      by_rule(section + ".enabled",
              "true: `mixed_precision.param` \"bf16\", and `mixed_precision.reduce` \"bf16\" unless "
              "`communication_data_type` says "
              "another type",
              [](auto& session, const auto& key) { enable(session, key, "bf16"); }),
      ignores(section + ".immediate_grad_update", "Tessera reduces each unit's gradients as soon as they are there"),
      ignores(section + ".check_grad_overflow", "Tessera skips a step whose gradients are not finite, always"),
      expects(section + ".bf16_master_weights_and_grads", false, "master weights are fp32",
              "Tessera's master weights are fp32 always, and take 2 bytes beside a bf16 parameter. "
              "optimizer.state_dtype \"bf16\" or \"8bit\" "
              "saves memory"),
      expects(section + ".bf16_optimizer_states", false, "optimizer states are fp32",
              "set optimizer.state_dtype \"bf16\" instead: Tessera rounds such states stochastically, DeepSpeed to "
              "nearest"),
  };
  // DeepSpeed's older versions did not read these, and many files have them.
  for (const char* name :
       {"auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"})
    rows.push_back(ignores(section + "." + name, "bf16 needs no loss scaling"));
  return rows;
}

}  // namespace

bool deepspeed_trains_in(const ImportSession& session, const std::string& dtype) {
  if (session.is_on(dtype + ".enabled") || (dtype == "bf16" && session.is_on("bfloat16.enabled"))) return true;
  const JsonNode* accelerate = session.find("accelerate.mixed_precision");
  const JsonNode* kind = session.find("accelerate.distributed_type");
  return accelerate != nullptr && kind != nullptr && word_of(*kind) == "deepspeed" && word_of(*accelerate) == dtype;
}

std::vector<ImportRow> deepspeed_precision_rows() {
  return fp16_rows() + bf16_rows("bf16") + bf16_rows("bfloat16") +
         std::vector<ImportRow>{
             by_rule("communication_data_type", "`mixed_precision.reduce`; fp16 is refused unless fp16 is enabled",
                     communication_type),
             ignores("seq_parallel_communication_data_type", "there is no sequence parallelism"),
             by_rule("data_types.grad_accum_dtype", "fp32: ignored, as Tessera adds up in fp32; else refused",
                     accumulation_type),
             refuses("data_types.param_dtype", "bf16.enabled or fp16.enabled says the type of parameters"),
             refuses("data_types.buffer_dtype", "buffers keep the type that the program gives them"),
             switched_off(
                 "amp", "Apex's AMP is not there. Use fp16.enabled or bf16.enabled, which give mixed_precision.param"),
             switched_off("torch_autocast",
                          "autocast is the program's: it calls forward under torch.autocast or at::autocast. "
                          "Parameters in 16 bits are "
                          "mixed_precision.param"),
         };
}

void finish_deepspeed_precision(ImportSession& session) {
  const std::string why = "DeepSpeed's default";
  for (const char* dtype : {"fp16", "bf16"})
    if (session.settings().count(kParam) > 0 && session.settings().at(kParam) == dtype &&
        !session.is_auto("communication_data_type"))
      session.imply(
          kReduce, dtype,
          "DeepSpeed sends gradients in the type of the parameters, unless communication_data_type says another");
  const bool scaled =
      session.settings().count(kParam) > 0 && session.settings().at(kParam) == "fp16" && !has_fixed_scale(session);
  if (!scaled) return;
  if (!session.is_auto("fp16.loss_scale_window")) session.imply(std::string(kScale) + "growth_interval", 1000, why);
  if (counts_overflows(session) && !session.is_auto("fp16.hysteresis"))
    session.imply(
        std::string(kScale) + "hysteresis", 2,
        why +
            ". Difference: Tessera counts overflows in a row, and DeepSpeed also those with finite steps between them");
}

}  // namespace tessera::app
