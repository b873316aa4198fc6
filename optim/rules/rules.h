#pragma once

#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/lamb.h"
#include "optim/rules/lars.h"
#include "optim/rules/lion.h"
#include "optim/rules/rmsprop.h"
#include "optim/rules/sgd.h"

namespace tessera {

// clang-format off
/// The rules that update elements: RULE(enumerator, struct). Enumerators are those of OptimizerType: the rule of a type
/// has the type's name. All code with a case for each rule is made from this list.
#define TESSERA_STEP_RULES(RULE) \
  RULE(kAdam, AdamRule)          \
  RULE(kSgd, SgdRule)            \
  RULE(kLion, LionRule)          \
  RULE(kAdagrad, AdagradRule)    \
  RULE(kRmsprop, RmspropRule)    \
  RULE(kLamb, LambDirectionRule) \
  RULE(kLars, LarsRule)
// clang-format on

#define TESSERA_ENUMERATOR(enumerator, Rule) enumerator,
enum class StepRule { TESSERA_STEP_RULES(TESSERA_ENUMERATOR) };
#undef TESSERA_ENUMERATOR

#define TESSERA_ONE(enumerator, Rule) +1
inline constexpr int kStepRules = TESSERA_STEP_RULES(TESSERA_ONE);
#undef TESSERA_ONE

/// The constants of one rule, for one parameter in one step. Only code for this rule may read them.
union RuleConstants {
#define TESSERA_MEMBER(enumerator, Rule) Rule::Constants of_##Rule;
  TESSERA_STEP_RULES(TESSERA_MEMBER)
#undef TESSERA_MEMBER
};

/// Returns the constants of the rule.
#define TESSERA_CONSTANTS_FOR(enumerator, Rule) \
  TESSERA_ALWAYS_INLINE const Rule::Constants& constants_for(const RuleConstants& c, Rule) { return c.of_##Rule; }
TESSERA_STEP_RULES(TESSERA_CONSTANTS_FOR)
#undef TESSERA_CONSTANTS_FOR

/// Computes the constants of a parameter's step number `step` (from 1) from a rule's configuration. It computes in fp64
/// and without contraction, so that all ranks and GPUs get the same bits. A GPU computes the constants itself, since
/// only the device has the number of applied steps.
TESSERA_ALWAYS_INLINE RuleConstants rule_constants(StepRule rule, const RuleNumbers& numbers, std::int64_t step,
                                                   float lr) {
  RuleConstants c{};
  switch (rule) {
#define TESSERA_CASE(enumerator, Rule)                \
  case StepRule::enumerator:                          \
    c.of_##Rule = Rule::constants(numbers, step, lr); \
    break;
    TESSERA_STEP_RULES(TESSERA_CASE)
#undef TESSERA_CASE
  }
  return c;
}

/// Whether the rule's formula returns directions.
template <class Rule>
inline constexpr bool kIsOfDirections = requires {
  Rule::kMakesDirection;
};

/// Returns whether the rule's pass computes directions, so that SgdRule must make the step after a parameter's rate is
/// known.
TESSERA_ALWAYS_INLINE bool makes_direction(StepRule rule) {
  switch (rule) {
#define TESSERA_CASE(enumerator, Rule) \
  case StepRule::enumerator:           \
    return kIsOfDirections<Rule>;
    TESSERA_STEP_RULES(TESSERA_CASE)
#undef TESSERA_CASE
  }
  return false;
}

/// Calls `body.template operator()<Rule>()` for the rule, and returns its result. Only host code calls it.
template <class Body>
auto with_rule(StepRule rule, const Body& body) -> decltype(body.template operator()<AdamRule>()) {
  switch (rule) {
#define TESSERA_CASE(enumerator, Rule) \
  case StepRule::enumerator:           \
    return body.template operator()<Rule>();
    TESSERA_STEP_RULES(TESSERA_CASE)
#undef TESSERA_CASE
  }
  return {};
}

}  // namespace tessera
