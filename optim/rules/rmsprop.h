#pragma once

#include "optim/rules/rule.h"

namespace tessera {

/// The constants of RmspropRule's formula.
struct RmspropConstants {
  float l2;     ///< g += l2 * p
  float alpha;  ///< square = square * alpha + (g * g) * one_minus_alpha
  float one_minus_alpha;
  float momentum;
  float lr;
  float eps;
  bool has_momentum;
  bool centered;
};

/// RMSprop (Hinton's lecture 6e, 2012), as `torch.optim.RMSprop` defines it; centered as in Graves, arXiv 1308.0850:
///
///   g += weight_decay * p
///   square = alpha * square + (1 - alpha) * g * g
///   centered: mean = mean + (1 - alpha) * (g - mean), and square - mean * mean in the place of square below
///   d = g / (sqrt(square) + eps)
///   momentum: buffer = momentum * buffer + d, and p -= lr * buffer; without: p -= lr * d
///
/// The difference square - mean * mean needs all bits of both numbers, so `centered` requires fp32 states.
struct RmspropRule {
  using Constants = RmspropConstants;
  static constexpr int kStates = 3;  ///< square, buffer, mean
  static constexpr StateCode kCodes[] = {StateCode::kRoot, StateCode::kSigned, StateCode::kExact};
  static constexpr bool kOptional[] = {false, true, true};
  static constexpr const char* kNames[] = {"square_avg", "momentum_buffer", "grad_avg"};
  static constexpr bool keeps(const RuleNumbers& n, int state) {
    return state == 1 ? n.momentum != 0.0 : n.is_centered;
  }

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t, float lr) {
    Constants c{};
    c.l2 = static_cast<float>(n.weight_decay);
    c.alpha = static_cast<float>(n.alpha);
    c.one_minus_alpha = static_cast<float>(1.0 - n.alpha);
    c.momentum = static_cast<float>(n.momentum);
    c.lr = lr;
    c.eps = static_cast<float>(n.eps);
    c.has_momentum = n.momentum != 0.0;
    c.centered = n.is_centered;
    return c;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float weight,
                                                               const Float* states) {
    g = g + c.l2 * weight;
    const Float square = states[0] * c.alpha + (g * g) * c.one_minus_alpha;
    Float mean = states[2], spread = square;
    if (c.centered) {
      mean = mean + (g - mean) * c.one_minus_alpha;
      const Float difference = square - mean * mean;
      spread = difference < 0.0f ? Float{} : difference;  // a difference below zero can only come from rounding
    }
    const Float root = V::sqrt(spread);
    if (!c.has_momentum) return {weight - (c.lr * g) / (root + c.eps), {square, states[1], mean}, root};
    const Float buffer = states[1] * c.momentum + g / (root + c.eps);
    return {weight - c.lr * buffer, {square, buffer, mean}, root};
  }
};

}  // namespace tessera
