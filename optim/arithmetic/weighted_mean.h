#pragma once

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// A step's gradients and losses come in as sums of weight * mean over ranks and microbatches (MicrobatchInfo::weight), with the sum of the
// weights. Where each weight is 1, these have the bits of a division by the number of microbatches. On the CPU and in kernels.

/// What a sum of gradients, each `scale` times as large as it is, is multiplied by to be the mean. 0 where nothing counts.
TESSERA_ALWAYS_INLINE double mean_factor(double weight, double scale) {
  return weight > 0.0 ? 1.0 / (weight * scale) : 0.0;
}

/// The mean loss. `loss`: the sum, divided by `microbatches`, those of a step on all ranks. NaN where nothing counts.
TESSERA_ALWAYS_INLINE double mean_loss(double loss, double microbatches, double weight) {
  return loss * (microbatches / weight);
}

}  // namespace tessera
