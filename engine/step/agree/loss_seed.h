#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// The gradient with which a backward begins. Step::seed_of makes it from the loss scale, and the Engine starts the
/// backward with it.
struct LossSeed {
  at::Tensor seed;    ///< the gradient of the loss, of its sizes, dtype and device
  at::Tensor factor;  ///< factor for every gradient afterwards (a scalar, fp32); undefined: 1
};

/// Multiplies `start` by `weight` (MicrobatchInfo::weight). The weight goes into the seed where its dtype holds the
/// weight exactly; it goes into the factor where bf16 would round it, and always in fp16, whose largest number is
/// 65504.
void weigh(LossSeed& start, double weight);

}  // namespace tessera
