#pragma once

#include "optim/step_loops.h"

namespace tessera {
namespace {

/// What SGD makes of one element. `buffer` is nothing without momentum.
template <class V>
struct SgdElement {
  typename V::Float weight, buffer;
};

/// The formulas of sgd.h for one number or a vector of them (V: Simd, or ScalarLane), as adam_element. `buffer` does not
/// count in the first step.
template <class V, class Float = typename V::Float>
TESSERA_ALWAYS_INLINE SgdElement<V> sgd_element(const SgdConstants& c, Float gradient, Float weight, Float buffer) {
  const Float g = gradient * c.gradient_scale + c.l2 * weight;
  Float direction = g, next = g;
  if (c.has_momentum) {
    if (!c.first_step) next = buffer * c.momentum + g * c.one_minus_dampening;
    direction = c.nesterov ? g + c.momentum * next : next;
  }
  return {weight - c.lr * direction, next};
}

}  // namespace
}  // namespace tessera
