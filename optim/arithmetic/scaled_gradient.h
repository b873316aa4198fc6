#pragma once

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// Returns a gradient in the form that rules need: multiplied by `scale` and then clipped to [-most, most] (0: not
/// clipped), as torch.nn.utils.clip_grad_value_ does. A NaN stays a NaN. The function takes one number or a vector of
/// numbers.
template <class Float>
TESSERA_ALWAYS_INLINE Float scaled_gradient(Float gradient, float scale, float most) {
  Float g = gradient * scale;
  if (most > 0.0f) {
    const Float highest = Float{} + most, lowest = Float{} - most;
    g = g > highest ? highest : g;
    g = g < lowest ? lowest : g;
  }
  return g;
}

}  // namespace tessera
