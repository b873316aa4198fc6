#pragma once

#include "optim/rules/rule.h"

namespace tessera {

/// The constants of MuonMomentumRule's formula.
struct MuonMomentumConstants {
  float momentum;
  float one_minus_momentum;
  bool nesterov;
};

/// The part of Muon (Jordan et al., 2024) that comes before a matrix is made orthogonal, as `torch.optim.Muon` defines
/// it. Then SgdRule with decoupled weight decay makes the step.
///
///   m = m + (1 - momentum) * (g - m)
///   direction = nesterov ? g + momentum * (m - g) : m
///
/// Without momentum the direction is g, and there is no state.
///
/// The rule returns the direction instead of the weight, so directions are written over the run that is updated.
struct MuonMomentumRule {
  using Constants = MuonMomentumConstants;
  static constexpr int kStates = 1;
  static constexpr StateCode kCodes[] = {StateCode::kSigned};
  static constexpr bool kOptional[] = {true};

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t, float) {
    Constants c{};
    c.momentum = static_cast<float>(n.momentum);
    c.one_minus_momentum = static_cast<float>(1.0 - n.momentum);
    c.nesterov = n.is_nesterov;
    return c;
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float,
                                                               const Float* states) {
    const Float momentum = states[0] + (g - states[0]) * c.one_minus_momentum;
    const Float direction = c.nesterov ? g + (momentum - g) * c.momentum : momentum;
    return {direction, {momentum}, Float{}};
  }
};

}  // namespace tessera
