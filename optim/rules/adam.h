#pragma once

// See docs/glossary.md: unit.

#include "optim/rules/rule.h"

namespace tessera {

/// Returns base^exponent by repeated squaring. It gives the same bits on every machine, so ranks on different hosts
/// agree on bias corrections. The last bit of `std::pow` depends on the processor that libm detects.
TESSERA_ALWAYS_INLINE double power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) result *= base;
  }
  return result;
}

/// The constants of AdamRule's formula. They are chosen so that an element costs only one square root and one division.
struct AdamConstants {
  float l2;               ///< adam: g += l2 * p; unused by adamw
  float decay;            ///< adamw: p *= decay, which is 1 - lr * weight_decay
  float one_minus_beta1;  ///< m += (g - m) * one_minus_beta1
  float beta2;            ///< v = v * beta2 + (g * g) * one_minus_beta2
  float one_minus_beta2;
  float step_size;  ///< lr * sqrt(1 - beta2^t) / (1 - beta1^t), the factor in p -= step_size * m / (sqrt(v) + eps)
  float eps;        ///< eps * sqrt(1 - beta2^t)
  bool decoupled;   ///< whether weight decay is decoupled, as in adamw
  bool frozen;      ///< whether v is frozen: v then becomes (g * g) * one_minus_beta2 if that is larger, or stays
};

/// Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) and AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2);
/// they differ only in the place of weight decay:
///
///   adam:  g += weight_decay * p          before the moments are updated
///   adamw: p *= 1 - lr * weight_decay     before the step, outside the moments
///   m  = m + (1 - beta1) * (g - m)
///   v  = beta2 * v + (1 - beta2) * g * g
///   p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
///
/// The last line is computed as `step_size * m / (sqrt(v) + eps')`, with both bias corrections folded into step_size
/// and eps' in fp64 beforehand. It is the same formula as PyTorch's, but rounded in another order, so results agree to
/// a few units in the last place, not bit for bit.
///
/// After `freeze_step` steps of a parameter (0: never), its second moments and their bias correction are frozen, as in
/// 1-bit Adam (Tang et al., arXiv 2102.02888). The reason is that sums of compressed gradients have the right mean, but
/// their squares do not. A second moment can still grow to the value that the present gradient alone would give, v =
/// max(v, (1 - beta2) * g * g). Otherwise an element that had no gradients before the freeze would move by lr * m /
/// eps.
struct AdamRule {
  using Constants = AdamConstants;
  static constexpr int kStates = 2;
  static constexpr StateCode kCodes[] = {StateCode::kSigned, StateCode::kRoot};
  static constexpr bool kOptional[] = {false, false};
  static constexpr const char* kNames[] = {"exp_avg", "exp_avg_sq"};

  /// Computes the constants. `step`: number of the step among those applied to the parameter, from 1.
  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t step, float lr) {
    const double correction1 = 1.0 - power(n.beta1, step);
    const bool is_frozen = n.freeze_step > 0 && step > n.freeze_step;
    const double root2 = __builtin_sqrt(1.0 - power(n.beta2, is_frozen ? n.freeze_step : step));
    const double rate = lr;
    Constants c{};
    c.l2 = static_cast<float>(n.weight_decay);
    c.decay = static_cast<float>(1.0 - rate * n.weight_decay);
    c.one_minus_beta1 = static_cast<float>(1.0 - n.beta1);
    c.beta2 = static_cast<float>(n.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - n.beta2);
    c.step_size = static_cast<float>(rate * root2 / correction1);
    c.eps = static_cast<float>(n.eps * root2);
    c.decoupled = n.is_decoupled;
    c.frozen = is_frozen;
    return c;
  }

  /// Returns whether a step is usual: a step of adamw whose second moments are not frozen. Loops have a separate copy
  /// for such steps.
  static TESSERA_ALWAYS_INLINE bool is_usual(const Constants& c) { return c.decoupled && !c.frozen; }
  static TESSERA_ALWAYS_INLINE void make_usual(Constants& c) {
    c.decoupled = true;
    c.frozen = false;
  }

  template <class Float>
  static TESSERA_ALWAYS_INLINE Float second_moment(const Constants& c, Float g, Float second) {
    const Float added = (g * g) * c.one_minus_beta2;
    if (c.frozen) return second < added ? added : second;
    return second * c.beta2 + added;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float weight,
                                                               const Float* states) {
    if (c.decoupled) {
      weight = weight * c.decay;
    } else {
      g = g + c.l2 * weight;
    }
    const Float first = states[0] + (g - states[0]) * c.one_minus_beta1;
    const Float second = second_moment(c, g, states[1]);
    const Float root = V::sqrt(second);
    return {weight - (c.step_size * first) / (root + c.eps), {first, second}, root};
  }
};

}  // namespace tessera
