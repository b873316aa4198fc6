#pragma once

#include "optim/rules/adagrad.h"
#include "optim/rules/adam.h"
#include "optim/rules/lamb.h"
#include "optim/rules/lars.h"
#include "optim/rules/lion.h"
#include "optim/rules/rmsprop.h"
#include "optim/rules/sgd.h"

namespace tessera {

/// The rules that update elements, each with a file in this folder.
enum class StepRule {
  kAdam,
  kSgd,
  kLion,
  kAdagrad,
  kRmsprop,
  kLamb,  ///< this makes directions; kSgd takes the step when a tensor's rate is known
  kLars,
};
inline constexpr int kStepRules = 7;

/// The constants of one rule, for one parameter in one step. The code that reads them must know the rule.
union RuleConstants {
  AdamConstants adam;
  SgdConstants sgd;
  LionConstants lion;
  AdagradConstants adagrad;
  RmspropConstants rmsprop;
  LambConstants lamb;
  LarsConstants lars;
};

TESSERA_ALWAYS_INLINE const AdamConstants& constants_for(const RuleConstants& c, AdamRule) { return c.adam; }
TESSERA_ALWAYS_INLINE const SgdConstants& constants_for(const RuleConstants& c, SgdRule) { return c.sgd; }
TESSERA_ALWAYS_INLINE const LionConstants& constants_for(const RuleConstants& c, LionRule) { return c.lion; }
TESSERA_ALWAYS_INLINE const AdagradConstants& constants_for(const RuleConstants& c, AdagradRule) { return c.adagrad; }
TESSERA_ALWAYS_INLINE const RmspropConstants& constants_for(const RuleConstants& c, RmspropRule) { return c.rmsprop; }
TESSERA_ALWAYS_INLINE const LambConstants& constants_for(const RuleConstants& c, LambDirectionRule) { return c.lamb; }
TESSERA_ALWAYS_INLINE const LarsConstants& constants_for(const RuleConstants& c, LarsRule) { return c.lars; }

/// Folds a rule's configuration into the constants of a parameter's step `step` (from 1). It computes in fp64 and
/// without contraction, so that all ranks get the same bits, and so does a GPU, which alone knows how many steps were
/// applied.
TESSERA_ALWAYS_INLINE RuleConstants rule_constants(StepRule rule, const RuleNumbers& numbers, std::int64_t step,
                                                   float lr) {
  RuleConstants c{};
  switch (rule) {
    case StepRule::kAdam:
      c.adam = AdamRule::constants(numbers, step, lr);
      break;
    case StepRule::kSgd:
      c.sgd = SgdRule::constants(numbers, step, lr);
      break;
    case StepRule::kLion:
      c.lion = LionRule::constants(numbers, step, lr);
      break;
    case StepRule::kAdagrad:
      c.adagrad = AdagradRule::constants(numbers, step, lr);
      break;
    case StepRule::kRmsprop:
      c.rmsprop = RmspropRule::constants(numbers, step, lr);
      break;
    case StepRule::kLamb:
      c.lamb = LambDirectionRule::constants(numbers, step, lr);
      break;
    case StepRule::kLars:
      c.lars = LarsRule::constants(numbers, step, lr);
      break;
  }
  return c;
}

}  // namespace tessera
