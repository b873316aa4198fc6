#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// What a step that updates a parameter does with its weights' average.
enum class AverageStart : std::uint8_t {
  kGoesOn,  ///< it moves on: an earlier step began it
  kBefore,  ///< it begins at the weight before the step, and moves
  kAfter,   ///< it begins as a copy of the weight after the step
};

/// All averages begin with the run's first step that updates parameters, as copies of the weights after it: so does
/// torch.optim.swa_utils.AveragedModel. A parameter that this step left alone has its average from then on too, which is its weight until the
/// parameter's own first update. `step`: which of the parameter's updates this one is, from 1.
TESSERA_ALWAYS_INLINE AverageStart average_start(std::int64_t step, bool is_first_of_run) {
  if (step > 1) return AverageStart::kGoesOn;
  return is_first_of_run ? AverageStart::kAfter : AverageStart::kBefore;
}

/// The exponential moving average of a weight after a step: average += (weight - average) * share, where share is
/// 1 - decay. One number or a vector of them.
template <class Float>
TESSERA_ALWAYS_INLINE Float average_element(Float average, Float before, Float after, float share, AverageStart start) {
  if (start == AverageStart::kAfter) return after;
  const Float from = start == AverageStart::kBefore ? before : average;
  return from + (after - from) * share;
}

}  // namespace tessera
