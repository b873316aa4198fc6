#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// What a backward begins with.
struct LossSeed {
  at::Tensor seed;    ///< the gradient of the loss, of its sizes, dtype and device
  at::Tensor factor;  ///< what every gradient has to be multiplied by afterwards (a scalar, fp32); undefined: nothing
};

/// Multiplies it by `weight` (MicrobatchInfo::weight). A seed in bf16 would round most weights, and one in fp16 ends at
/// 65504: there the weight goes into the factor.
void weigh(LossSeed& start, double weight);

}  // namespace tessera
