#pragma once

#include "optim/arithmetic/instruction_set.h"
#include "optim/rules/rules.h"

namespace tessera {

/// Returns the ratio that the rule computes, or 1 for a rule that does not adapt rates.
template <class Rule>
TESSERA_ALWAYS_INLINE double ratio_of(const RuleNumbers& numbers, double trust_coefficient, double weights_norm,
                                      double update_norm) {
  if constexpr (requires { &Rule::trust_ratio; }) {
    return Rule::trust_ratio(numbers, trust_coefficient, weights_norm, update_norm);
  } else {
    return 1;
  }
}

/// Returns the factor by which LAMB and LARS multiply a tensor's rate. The norms are those of the tensor's weights, and
/// of its directions (lamb) or its scaled gradient (lars):
///
///   lamb: weights / update                                                          (arXiv 1904.00962, without bounds)
///   lars: trust_coefficient * weights / (update + weight_decay * weights + eps)     (arXiv 1708.03888)
///
/// The factor is 1 if one of the two norms is zero. It is computed in fp64; GPUs use the same code.
TESSERA_ALWAYS_INLINE double trust_ratio(StepRule rule, const RuleNumbers& numbers, double trust_coefficient,
                                         double weights_norm, double update_norm) {
  if (!(weights_norm > 0) || !(update_norm > 0)) return 1;
  switch (rule) {
#define TESSERA_CASE(enumerator, Rule) \
  case StepRule::enumerator:           \
    return ratio_of<Rule>(numbers, trust_coefficient, weights_norm, update_norm);
    TESSERA_STEP_RULES(TESSERA_CASE)
#undef TESSERA_CASE
  }
  return 1;
}

}  // namespace tessera
