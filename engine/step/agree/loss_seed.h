#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// The gradient with which a backward begins. Step::seed_of makes it from the loss scale, and the Engine starts the
/// backward with it.
struct LossSeed {
  at::Tensor seed;    ///< the gradient of the loss, with the sizes, dtype and device of the loss
  at::Tensor factor;  ///< factor for every gradient afterwards (a scalar, fp32); undefined: 1
};

/// Multiplies `start` by `weight` (MicrobatchInfo::weight). The weight goes into the seed if the seed's dtype holds it
/// exactly. It goes into the factor if bf16 would round it, and always for fp16, whose largest number is 65504.
void weigh(LossSeed& start, double weight);

}  // namespace tessera
