#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/average_element.h"
#include "runtime/base/noise.h"
#include "runtime/base/state_dtype.h"

namespace tessera {

/// The formats in which the weights of parameters are stored.
enum class WeightFormat {
  kF32,         ///< fp32 master, which is the parameter
  kF32AndF32,   ///< fp32 master, with an fp32 copy
  kF32AndBF16,  ///< fp32 master, and a copy rounded to bf16
  kF32AndF16,   ///< fp32 master, and a copy rounded to fp16
  kSplitBF16,   ///< bf16 parameter, and the master's low 16 bits
};

/// One state of `numel` elements: see StateSlice.
struct StateArgument {
  void* data = nullptr;
  float* scales = nullptr;
};

/// The average of a run's weights: see average_element.h. `values` is null if there is no average.
struct AverageArgument {
  float* values = nullptr;
  float share = 0.0f;  ///< 1 - decay
  AverageStart start = AverageStart::kGoesOn;
};

/// The largest number of states that a rule has (optim/rules).
inline constexpr int kMostRuleStates = 3;

/// An OptimizerSlice, checked and split into plain pointers; OptimizerSlice explains these values. StepArguments also
/// has the numbers of a step that loops need for every rule.
struct StepArguments {
  std::size_t numel = 0;
  const float* gradient = nullptr;
  float* master = nullptr;
  std::int16_t* low = nullptr;
  void* parameter = nullptr;
  StateArgument states[kMostRuleStates];  ///< in the order of the rule's states; null if the rule has fewer
  AverageArgument average;
  WeightFormat weights = WeightFormat::kF32;
  StateDType state_dtype = StateDType::kF32;       ///< dtype of the states, except those that are StateCode::kExact
  float gradient_scale = 1.0f, clip_value = 0.0f;  ///< see scaled_gradient.h
  NoiseKey noise;
  std::uint32_t first_element = 0;  ///< index of the run's first element in its group, modulo 2^32
};

/// Returns the part of `a` for elements [begin, begin + count). REQUIRES: with 8-bit states, `begin` is a multiple of
/// kStateBlock.
StepArguments part_of(const StepArguments& a, std::size_t begin, std::size_t count);

}  // namespace tessera
