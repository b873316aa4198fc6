#pragma once

#include "optim/rules/rule.h"

namespace tessera {

/// The constants of LarsRule's formula.
struct LarsConstants {
  float l2;  ///< weight_decay
  float momentum;
  float rate;     ///< the schedule's rate times the tensor's trust ratio
  bool nesterov;  ///< whether the step is momentum * buffer + the new share, instead of the buffer
};

/// LARS (You et al., arXiv 1708.03888, algorithm 1), for a tensor whose rate is known. The rate is inside the momentum:
///
///   share = rate * (g + weight_decay * p)
///   buffer = momentum * buffer + share
///   p -= nesterov ? momentum * buffer + share : buffer
///
/// Without momentum there is no buffer: p -= share.
struct LarsRule {
  using Constants = LarsConstants;
  static constexpr int kStates = 1;
  static constexpr StateCode kCodes[] = {StateCode::kSigned};
  static constexpr bool kOptional[] = {true};
  static constexpr const char* kNames[] = {"momentum_buffer"};
  static constexpr bool keeps(const RuleNumbers& n, int) { return n.momentum != 0.0; }

  static TESSERA_ALWAYS_INLINE Constants constants(const RuleNumbers& n, std::int64_t, float rate) {
    Constants c{};
    c.l2 = static_cast<float>(n.weight_decay);
    c.momentum = static_cast<float>(n.momentum);
    c.rate = rate;
    c.nesterov = n.is_nesterov;
    return c;
  }

  static TESSERA_ALWAYS_INLINE double trust_ratio(const RuleNumbers& n, double trust_coefficient, double weights_norm,
                                                  double update_norm) {
    return trust_coefficient * weights_norm / (update_norm + n.weight_decay * weights_norm + n.eps);
  }

  template <class V, class Float = typename V::Float>
  static TESSERA_ALWAYS_INLINE RuleElement<V, kStates> element(const Constants& c, Float g, Float weight,
                                                               const Float* states) {
    const Float share = (g + c.l2 * weight) * c.rate;
    const Float buffer = states[0] * c.momentum + share;
    return {weight - (c.nesterov ? c.momentum * buffer + share : buffer), {buffer}, Float{}};
  }
};

}  // namespace tessera
