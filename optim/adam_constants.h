#pragma once

#include <cstdint>

#include "optim/instruction_set.h"
#include "optim/step_loops.h"

namespace tessera {

/// The hyperparameters of Adam or AdamW (adamw.h).
struct AdamHyperparameters {
  double beta1, beta2, eps, weight_decay;
  bool decoupled;  ///< AdamW
};

/// base^exponent by repeated squaring. Unlike `std::pow`, whose last bit depends on the processor that libm detects,
/// it gives the same bits on every machine, so ranks on different hosts agree on bias corrections.
TESSERA_ALWAYS_INLINE double power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) result *= base;
  }
  return result;
}

/// Both bias corrections, folded in fp64 into the step's size and eps. `step` counts applied steps from 1. With a GPU only
/// the device knows how many steps were applied, so it does this itself, with the same bits.
TESSERA_ALWAYS_INLINE AdamConstants adam_constants(const AdamHyperparameters& h, std::int64_t step, float lr,
                                                   float gradient_scale) {
  const double correction1 = 1.0 - power(h.beta1, step);
  const double root2 = __builtin_sqrt(1.0 - power(h.beta2, step));
  const double rate = lr;
  AdamConstants c{};
  c.gradient_scale = gradient_scale;
  c.l2 = static_cast<float>(h.weight_decay);
  c.decay = static_cast<float>(1.0 - rate * h.weight_decay);
  c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  c.beta2 = static_cast<float>(h.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  c.step_size = static_cast<float>(rate * root2 / correction1);
  c.eps = static_cast<float>(h.eps * root2);
  c.decoupled = h.decoupled;
  return c;
}

}  // namespace tessera
