#pragma once

#include "optim/instruction_set.h"

namespace tessera {

/// The exponential moving average of a weight after a step: average += (weight - average) * share, where share is
/// 1 - decay. With the first step that updates its parameter it begins, at the value `before` that step: so what is written
/// into parameters before training is in it. One number or a vector of them.
template <class Float>
TESSERA_ALWAYS_INLINE Float average_element(Float average, Float before, Float after, float share, bool begins) {
  const Float from = begins ? before : average;
  return from + (after - from) * share;
}

}  // namespace tessera
