#pragma once

#include "optim/rules/rule.h"

namespace tessera {

/// The constants of AdagradRule's formula.
struct AdagradConstants {
  float l2;  ///< g += l2 * p
  float lr;  ///< lr / (1 + (t - 1) * lr_decay)
  float eps;
};

/// Adagrad (Duchi, Hazan and Singer, JMLR 2011), as `torch.optim.Adagrad` defines it, with an accumulator that begins
/// at 0:
///
///   g   += weight_decay * p
///   sum += g * g
///   p   -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)
struct AdagradRule {
  using Constants = AdagradConstants;
  static constexpr int kStates = 1;
  static constexpr StateCode kCodes[] = {StateCode::kRoot};
  static constexpr bool kOptional[] = {false};
  static constexpr const char* kNames[] = {"sum"};

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t step, float lr) {
    Constants c{};
    c.l2 = static_cast<float>(n.weight_decay);
    c.lr = static_cast<float>(static_cast<double>(lr) / (1.0 + static_cast<double>(step - 1) * n.lr_decay));
    c.eps = static_cast<float>(n.eps);
    return c;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float weight,
                                                               const Float* states) {
    g = g + c.l2 * weight;
    const Float sum = states[0] + g * g;
    const Float root = V::sqrt(sum);
    return {weight - (c.lr * g) / (root + c.eps), {sum}, root};
  }
};

}  // namespace tessera
