#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/noise.h"
#include "runtime/base/state_dtype.h"

namespace tessera {

/// How a loop keeps the weights of its parameters.
enum class WeightFormat {
  kF32,         ///< fp32 master, which is the parameter
  kF32AndF32,   ///< fp32 master, and a copy of it
  kF32AndBF16,  ///< fp32 master, and a copy rounded to bf16
  kF32AndF16,   ///< fp32 master, and a copy rounded to fp16
  kSplitBF16,   ///< bf16 parameter, and the master's low 16 bits
};

/// One state of `numel` elements: see StateSlice.
struct StateArgument {
  void* data = nullptr;
  float* scales = nullptr;
};

/// An OptimizerSlice, checked and taken apart into plain pointers; see there for what each is.
struct StepArguments {
  std::size_t numel = 0;
  const float* gradient = nullptr;
  float* master = nullptr;
  std::int16_t* low = nullptr;
  void* parameter = nullptr;
  StateArgument state0, state1;
  WeightFormat weights = WeightFormat::kF32;
  StateDType states = StateDType::kF32;
  NoiseKey noise;
  std::uint32_t first_element = 0;  ///< modulo 2^32
};

}  // namespace tessera
