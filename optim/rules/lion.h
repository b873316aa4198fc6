#pragma once

#include "optim/rules/rule.h"

namespace tessera {

/// The constants of LionRule's formula.
struct LionConstants {
  float decay;            ///< p *= decay, which is 1 - lr * weight_decay
  float one_minus_beta1;  ///< 1 - beta1, for the direction of a step
  float one_minus_beta2;  ///< 1 - beta2, for the new momentum
  float lr;
};

/// Lion (Chen et al., arXiv 2302.06675, algorithm 2): every element moves by the learning rate, whatever the size of
/// its gradient. The rule has one state.
///
///   p *= 1 - lr * weight_decay
///   p -= lr * sign(beta1 * m + (1 - beta1) * g)
///   m  = beta2 * m + (1 - beta2) * g
///
/// The means are computed as m + (1 - beta) * (g - m). PyTorch has no Lion.
struct LionRule {
  using Constants = LionConstants;
  static constexpr int kStates = 1;
  static constexpr StateCode kCodes[] = {StateCode::kSigned};
  static constexpr bool kOptional[] = {false};
  static constexpr const char* kNames[] = {"exp_avg"};

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t, float lr) {
    Constants c{};
    c.decay = static_cast<float>(1.0 - static_cast<double>(lr) * n.weight_decay);
    c.one_minus_beta1 = static_cast<float>(1.0 - n.beta1);
    c.one_minus_beta2 = static_cast<float>(1.0 - n.beta2);
    c.lr = lr;
    return c;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float weight,
                                                               const Float* states) {
    const Float to_gradient = g - states[0];
    const Float direction = states[0] + to_gradient * c.one_minus_beta1;
    weight = weight * c.decay;
    const Float lower = weight - c.lr, higher = weight + c.lr;
    const Float moved = direction > 0.0f ? lower : (direction < 0.0f ? higher : weight);
    return {moved, {states[0] + to_gradient * c.one_minus_beta2}, Float{}};
  }
};

}  // namespace tessera
