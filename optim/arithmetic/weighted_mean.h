#pragma once

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// A step's gradients and losses are sums, over ranks and microbatches, of weight * mean (MicrobatchInfo::weight). The
// sum of the weights is given too. If each weight is 1, these functions give the same bits as a division by the number
// of microbatches. The CPU and kernels call them.

/// Returns the factor that turns a sum of gradients into their mean. The factor is 0 if the sum of weights is 0. Each
/// gradient in the sum is `scale` times too large.
TESSERA_ALWAYS_INLINE double mean_factor(double weight, double scale) {
  return weight > 0.0 ? 1.0 / (weight * scale) : 0.0;
}

/// Returns the mean loss. `loss`: the sum of weight * mean loss, divided by `microbatches`, which is the number of a
/// step's microbatches on all ranks. The result is NaN if the sum of weights is 0.
TESSERA_ALWAYS_INLINE double mean_loss(double loss, double microbatches, double weight) {
  return loss * (microbatches / weight);
}

}  // namespace tessera
