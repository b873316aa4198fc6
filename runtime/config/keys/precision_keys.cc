#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {
namespace {

Condition with_loss_scale() {
  return {"mixed_precision.param fp16", {"/mixed_precision/param"}, [](const Strategy& s) {
            return s.mixed_precision.param == DType::kF16;
          }};
}
Condition with_dynamic_loss_scale() {
  return {
      "mixed_precision.param fp16 and loss_scale.dynamic true",
      {"/mixed_precision/param", "/mixed_precision/loss_scale/dynamic"},
      [](const Strategy& s) { return s.mixed_precision.param == DType::kF16 && s.mixed_precision.loss_scale.dynamic; }};
}

}  // namespace

std::vector<StrategyKey> precision_keys() {
  return {
      {.pointer = "/mixed_precision/param",
       .field = choice_field(AT(mixed_precision.param), training_dtypes()),
       .default_json = R"("fp32")",
       .example_json = R"("bf16")",
       .doc = "Type of gathered parameters, and so of forward and backward. Master weights are always fp32.",
       .cost = "Types of 2 bytes halve gathers and activations, and cost precision."},
      {.pointer = "/mixed_precision/reduce",
       .field = choice_field(AT(mixed_precision.reduce), training_dtypes()),
       .default_json = R"("fp32")",
       .example_json = R"("bf16")",
       .doc = "Type of gradients on the wire. Sums are accumulated in fp32 whatever it is.",
       .cost = "Types of 2 bytes halve the reduction, and round every gradient once more."},
      {.pointer = "/mixed_precision/master",
       .field = choice_field(AT(mixed_precision.master), master_kinds()),
       .default_json = R"("split")",
       .example_json = R"("fp32")",
       .doc = "How the fp32 master weights of bf16 parameters are kept. Nothing is lost either way.",
       .cost = "fp32: 2 bytes a parameter more, for bf16 parameters that are rounded as PyTorch rounds them.",
       .only_if = {"mixed_precision.param bf16",
                   {"/mixed_precision/param"},
                   [](const Strategy& s) { return s.mixed_precision.param == DType::kBF16; }}},
      {.pointer = "/mixed_precision/keep_fp32",
       .field = names_field(AT(mixed_precision.keep_fp32)),
       .default_json = R"(["BatchNorm"])",
       .example_json = R"(["BatchNorm", "Router"])",
       .doc = "Classes (by the beginning of their name) whose parameters stay fp32.",
       .cost = "Memory and communication: 4 bytes a parameter instead of 2."},
      {.pointer = "/mixed_precision/loss_scale/dynamic",
       .field = boolean_field(AT(mixed_precision.loss_scale.dynamic)),
       .default_json = "true",
       .example_json = "true",
       .doc = "Let the scale follow the gradients (arXiv 1710.03740, section 3.2). false: it stays at initial.",
       .cost = "A step that overflows is skipped.",
       .only_if = with_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/initial",
       .field = number_field(AT(mixed_precision.loss_scale.initial)),
       .range = {0, 4294967296.0, true},
       .default_json = "65536.0",
       .example_json = "32768",
       .doc = "The scale of the first step.",
       .cost = "Too high: the first steps overflow and are skipped. Too low: small gradients vanish.",
       .only_if = with_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/growth_factor",
       .field = number_field(AT(mixed_precision.loss_scale.growth_factor)),
       .range = {1, 1024, true},
       .default_json = "2.0",
       .example_json = "2",
       .doc = "The scale is multiplied by it after growth_interval finite steps.",
       .cost = "More overflows.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/backoff_factor",
       .field = number_field(AT(mixed_precision.loss_scale.backoff_factor)),
       .range = {0, 1, true, true},
       .default_json = "0.5",
       .example_json = "0.5",
       .doc = "The scale is multiplied by it after an overflow.",
       .cost = "Nearer to 1: more steps are skipped until the scale fits.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/growth_interval",
       .field = integer_field(AT(mixed_precision.loss_scale.growth_interval)),
       .range = {1, kMany},
       .unit = "steps",
       .default_json = "2000",
       .example_json = "1000",
       .doc = "Finite steps in a row before the scale grows.",
       .cost = "The scale recovers more slowly.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/hysteresis",
       .field = integer_field(AT(mixed_precision.loss_scale.hysteresis)),
       .range = {1, kMany},
       .unit = "steps",
       .default_json = "1",
       .example_json = "2",
       .doc = "Overflows in a row before the scale falls.",
       .cost = "More skipped steps while the scale is too high.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/minimum",
       .field = number_field(AT(mixed_precision.loss_scale.minimum)),
       .range = {0, 4294967296.0, true},
       .default_json = "1.0",
       .example_json = "1",
       .doc = "The scale never falls below it.",
       .cost = "Above what the gradients allow, every step overflows.",
       .only_if = with_dynamic_loss_scale()},
  };
}

}  // namespace tessera
