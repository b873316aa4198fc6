#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// The state of the loss scale, which checkpoints keep.
struct LossScalerState {
  float scale = 1.0f;
  std::int64_t finite_steps = 0;    ///< number of finite steps since the latest overflow or growth of the scale
  std::int64_t overflow_steps = 0;  ///< number of overflows in a row up to the latest step
};

/// LossScaleConfig (tessera/strategy.h) as plain data.
struct LossScaleRule {
  double growth_factor = 2.0, backoff_factor = 0.5, minimum = 1.0;
  std::int64_t growth_interval = 2000, hysteresis = 1;
  bool dynamic = false;
};

/// Updates the loss scale after a step (loss_scale.h). The CPU and the GPU call this function, and get the same bits.
TESSERA_ALWAYS_INLINE void next_loss_scale(const LossScaleRule& rule, LossScalerState& state, bool overflow) {
  if (!rule.dynamic) return;
  if (overflow) {
    state.finite_steps = 0;
    if (++state.overflow_steps < rule.hysteresis) return;
    const double smaller = state.scale * rule.backoff_factor;
    const auto most = static_cast<float>(smaller < rule.minimum ? rule.minimum : smaller);
    if (most < state.scale) state.scale = most;  // if the scale is already below the minimum, it is not raised
    return;
  }
  state.overflow_steps = 0;
  if (++state.finite_steps != rule.growth_interval) return;
  state.finite_steps = 0;
  const auto larger = static_cast<float>(state.scale * rule.growth_factor);
  if (larger - larger == 0.0f) state.scale = larger;  // true if `larger` is finite
}

}  // namespace tessera
