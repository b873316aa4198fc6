#pragma once

#include "optim/instruction_set.h"
#include "optim/step_loops.h"

namespace tessera {
namespace {

/// What Adam makes of one element. `root` is the square root of the second moment: the step needs it, and 8-bit states
/// keep it.
template <class V>
struct AdamElement {
  typename V::Float weight, first, second, root;
};

/// The formulas of adamw.h for one number or a vector of them (V: Simd, or ScalarLane). Each operation is rounded on its
/// own, so CPUs and GPUs agree bit for bit.
template <class V, class Float = typename V::Float>
TESSERA_ALWAYS_INLINE AdamElement<V> adam_element(const AdamConstants& c, Float gradient, Float weight, Float first,
                                                  Float second) {
  Float g = gradient * c.gradient_scale;
  if (c.decoupled) {
    weight = weight * c.decay;
  } else {
    g = g + c.l2 * weight;
  }
  const Float next_first = first + (g - first) * c.one_minus_beta1;
  const Float next_second = second * c.beta2 + (g * g) * c.one_minus_beta2;
  const Float root = V::sqrt(next_second);
  return {weight - (c.step_size * next_first) / (root + c.eps), next_first, next_second, root};
}

}  // namespace
}  // namespace tessera
