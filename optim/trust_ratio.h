#pragma once

#include "optim/arithmetic/instruction_set.h"
#include "optim/rules/rules.h"

namespace tessera {

/// Returns the factor by which LAMB and LARS multiply a tensor's rate. Norms are those of its weights, and of its
/// directions (lamb) or its scaled gradient (lars):
///
///   lamb: weights / update                                                          (arXiv 1904.00962, without bounds)
///   lars: trust_coefficient * weights / (update + weight_decay * weights + eps)     (arXiv 1708.03888)
///
/// and 1 where either is zero. It computes in fp64; GPUs share it.
TESSERA_ALWAYS_INLINE double trust_ratio(StepRule rule, const RuleNumbers& numbers, double trust_coefficient,
                                         double weights_norm, double update_norm) {
  if (!(weights_norm > 0) || !(update_norm > 0)) return 1;
  if (rule == StepRule::kLamb) return weights_norm / update_norm;
  return trust_coefficient * weights_norm / (update_norm + numbers.weight_decay * weights_norm + numbers.eps);
}

}  // namespace tessera
