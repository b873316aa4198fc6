#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {
namespace {

Condition with_loss_scale() { return with_value(AT(mixed_precision.param), "fp16", DType::kF16); }
Condition with_dynamic_loss_scale() {
  return {
      "mixed_precision.param fp16 and loss_scale.dynamic true",
      {"/mixed_precision/param", "/mixed_precision/loss_scale/dynamic"},
      [](const Strategy& s) { return s.mixed_precision.param == DType::kF16 && s.mixed_precision.loss_scale.dynamic; }};
}

}  // namespace

std::vector<StrategyKey> precision_keys() {
  return {
      {.field = choice_field(AT(mixed_precision.param), training_dtypes()),
       .example_json = R"("bf16")",
       .doc = "Type of gathered parameters, and so of forward and backward. Master weights are always fp32. \"fp32\" "
              "leaves a module that is narrower (half(), bfloat16()) as it is, and scales no loss.",
       .cost = "Types of 2 bytes halve gathers and activations, and cost precision."},
      {.field = choice_field(AT(mixed_precision.reduce), training_dtypes()),
       .example_json = R"("bf16")",
       .doc = "Type of gradients on the wire. Sums are accumulated in fp32 whatever it is.",
       .cost = "Types of 2 bytes halve the reduction, and round every gradient once more."},
      {.field = choice_field(AT(mixed_precision.master), master_kinds()),
       .example_json = R"("fp32")",
       .doc = "How the fp32 master weights of bf16 parameters are kept. Nothing is lost either way.",
       .cost = "fp32: 2 bytes a parameter more, for bf16 parameters that are rounded as PyTorch rounds them.",
       .only_if = with_value(AT(mixed_precision.param), "bf16", DType::kBF16)},
      {.field = names_field(AT(mixed_precision.keep_fp32)),
       .example_json = R"(["BatchNorm", "Router"])",
       .doc = "Classes (by the beginning of their name) whose parameters stay fp32.",
       .cost = "Memory and communication: 4 bytes a parameter instead of 2."},
      {.field = boolean_field(AT(mixed_precision.loss_scale.dynamic)),
       .example_json = "true",
       .doc = "Let the scale follow the gradients (arXiv 1710.03740, section 3.2). false: it stays at initial.",
       .cost = "A step that overflows is skipped.",
       .only_if = with_loss_scale()},
      {.field = number_field(AT(mixed_precision.loss_scale.initial), {0, 4294967296.0, true}),
       .example_json = "32768",
       .doc = "The scale of the first step.",
       .cost = "Too high: the first steps overflow and are skipped. Too low: small gradients vanish.",
       .only_if = with_loss_scale()},
      {.field = number_field(AT(mixed_precision.loss_scale.growth_factor), {1, 1024, true}),
       .example_json = "2",
       .doc = "The scale is multiplied by it after growth_interval finite steps.",
       .cost = "More overflows.",
       .only_if = with_dynamic_loss_scale()},
      {.field = number_field(AT(mixed_precision.loss_scale.backoff_factor), {0, 1, true, true}),
       .example_json = "0.5",
       .doc = "The scale is multiplied by it after an overflow.",
       .cost = "Nearer to 1: more steps are skipped until the scale fits.",
       .only_if = with_dynamic_loss_scale()},
      {.field = integer_field(AT(mixed_precision.loss_scale.growth_interval), {1, kMany}, "steps"),
       .example_json = "1000",
       .doc = "Finite steps in a row before the scale grows.",
       .cost = "The scale recovers more slowly.",
       .only_if = with_dynamic_loss_scale()},
      {.field = integer_field(AT(mixed_precision.loss_scale.hysteresis), {1, kMany}, "steps"),
       .example_json = "2",
       .doc = "Overflows in a row before the scale falls.",
       .cost = "More skipped steps while the scale is too high.",
       .only_if = with_dynamic_loss_scale()},
      {.field = number_field(AT(mixed_precision.loss_scale.minimum), {0, 4294967296.0, true}),
       .example_json = "1",
       .doc = "The scale never falls below it.",
       .cost = "Above what the gradients allow, every step overflows.",
       .only_if = with_dynamic_loss_scale()},
  };
}

}  // namespace tessera
