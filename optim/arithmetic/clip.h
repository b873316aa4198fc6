#pragma once

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// Returns the factor by which gradients with the 2-norm `norm` are multiplied, so that their norm becomes at most
/// `most` (0: no limit). It is most / (norm + 1e-6), but never above 1, as in torch.nn.utils.clip_grad_norm_. The CPU
/// and kernels call it.
TESSERA_ALWAYS_INLINE double clip_factor(double norm, double most) {
  if (most <= 0) return 1.0;
  const double factor = most / (norm + 1e-6);
  return factor < 1.0 ? factor : 1.0;
}

}  // namespace tessera
