#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// The ways in which a step that updates a parameter treats the average of its weights.
enum class AverageStart : std::uint8_t {
  kGoesOn,  ///< the average is updated, since an earlier step began it
  kBefore,  ///< the average begins with the weight before the step, and is updated
  kAfter,   ///< the average begins as a copy of the weight after the step
};

/// Returns the way in which a parameter's average begins. All averages begin with the run's first step that updates
/// parameters, as copies of the weights after the step; torch.optim.swa_utils.AveragedModel does the same. A parameter
/// that this first step did not update also has an average from then on. That average equals the weight until the
/// parameter's own first update. `step`: the number of this update among the parameter's updates, from 1.
TESSERA_ALWAYS_INLINE AverageStart average_start(std::int64_t step, bool is_first_of_run) {
  if (step > 1) return AverageStart::kGoesOn;
  return is_first_of_run ? AverageStart::kAfter : AverageStart::kBefore;
}

/// Returns the exponential moving average of a weight after a step: average += (weight - average) * share, where share
/// is 1 - decay. The function takes one number or a vector of numbers.
template <class Float>
TESSERA_ALWAYS_INLINE Float average_element(Float average, Float before, Float after, float share, AverageStart start) {
  if (start == AverageStart::kAfter) return after;
  const Float from = start == AverageStart::kBefore ? before : average;
  return from + (after - from) * share;
}

}  // namespace tessera
