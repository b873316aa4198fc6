#pragma once

#include "optim/rules/adam.h"

namespace tessera {

/// The constants of LambDirectionRule's formula.
struct LambConstants {
  AdamConstants adam;  ///< AdamConstants for a learning rate of 1
  float decay;         ///< weight_decay
};

/// The direction of LAMB (You et al., arXiv 1904.00962, algorithm 2): the step of AdamW, before the tensor's rate is
/// known. Then SgdRule without momentum makes the step.
///
///   m = m + (1 - beta1) * (g - m)
///   v = beta2 * v + (1 - beta2) * g * g
///   direction = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
///
/// The rule returns the direction instead of the weight. The CPU writes the direction over a copy of the weights; a GPU
/// writes it to DeviceRun::direction.
struct LambDirectionRule {
  using Constants = LambConstants;
  static constexpr bool kMakesDirection = true;
  static constexpr int kStates = AdamRule::kStates;
  static constexpr StateCode kCodes[] = {AdamRule::kCodes[0], AdamRule::kCodes[1]};
  static constexpr bool kOptional[] = {false, false};
  static constexpr const char* kNames[] = {AdamRule::kNames[0], AdamRule::kNames[1]};

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t step, float) {
    return {AdamRule::constants(n, step, /*lr=*/1.0f), static_cast<float>(n.weight_decay)};
  }

  static TESSERA_ALWAYS_INLINE double trust_ratio(const RuleNumbers&, double, double weights_norm, double update_norm) {
    return weights_norm / update_norm;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float weight,
                                                               const Float* states) {
    const Float first = states[0] + (g - states[0]) * c.adam.one_minus_beta1;
    const Float second = states[1] * c.adam.beta2 + (g * g) * c.adam.one_minus_beta2;
    const Float root = V::sqrt(second);
    return {(c.adam.step_size * first) / (root + c.adam.eps) + c.decay * weight, {first, second}, root};
  }
};

}  // namespace tessera
