#pragma once

#include "optim/rules/rule.h"

namespace tessera {

/// The constants of SgdRule's formula.
struct SgdConstants {
  float l2;        ///< g += l2 * p
  float decay;     ///< factor in p *= decay; it is 1 unless weight decay is decoupled
  float momentum;  ///< buffer = buffer * momentum + g * one_minus_dampening
  float one_minus_dampening;
  float lr;
  bool has_momentum;
  bool first_step;  ///< whether buffer = g: PyTorch's first step ignores dampening
  bool nesterov;    ///< whether the step is g + momentum * buffer instead of the buffer
};

/// Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it (Sutskever et al., ICML 2013, but with
/// the learning rate outside the buffer):
///
///   g += weight_decay * p
///   buffer = g at the first step (t = 1), afterwards momentum * buffer + (1 - dampening) * g
///   p -= lr * (nesterov ? g + momentum * buffer : buffer)
///
/// Without momentum the formula is p -= lr * g. There is then no buffer, or the buffer does not change
/// (Optimizer::set_numbers). If weight decay is decoupled, p *= 1 - lr * weight_decay comes first, and g is not
/// changed.
struct SgdRule {
  using Constants = SgdConstants;
  static constexpr int kStates = 1;
  static constexpr StateCode kCodes[] = {StateCode::kSigned};
  static constexpr bool kOptional[] = {true};
  static constexpr const char* kNames[] = {"momentum_buffer"};
  static constexpr bool keeps(const RuleNumbers& n, int) { return n.momentum != 0.0; }

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t step, float lr) {
    Constants c{};
    c.l2 = n.is_decoupled ? 0.0f : static_cast<float>(n.weight_decay);
    c.decay = n.is_decoupled ? static_cast<float>(1.0 - static_cast<double>(lr) * n.weight_decay) : 1.0f;
    c.momentum = static_cast<float>(n.momentum);
    c.one_minus_dampening = static_cast<float>(1.0 - n.dampening);
    c.lr = lr;
    c.has_momentum = n.momentum != 0.0;
    c.first_step = step <= 1;
    c.nesterov = n.is_nesterov;
    return c;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float gradient, Float weight,
                                                               const Float* states) {
    const Float g = gradient + c.l2 * weight;
    Float direction = g, buffer = states[0];
    if (c.has_momentum) {
      buffer = c.first_step ? g : states[0] * c.momentum + g * c.one_minus_dampening;
      direction = c.nesterov ? g + c.momentum * buffer : buffer;
    }
    return {weight * c.decay - c.lr * direction, {buffer}, Float{}};
  }
};

}  // namespace tessera
