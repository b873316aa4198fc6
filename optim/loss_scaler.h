#pragma once

#include <cstdint>

#include "runtime/base/strategy.h"

namespace tessera {

/// What a checkpoint keeps of a LossScaler.
struct LossScalerState {
  float scale = 1.0f;
  std::int64_t finite_steps = 0;   ///< since the scale last changed, or since the last overflow
  std::int64_t overflow_steps = 0; ///< in a row, up to now
};

/// The factor that the loss is multiplied by before backward, so that small gradients survive fp16 (Micikevicius et
/// al., arXiv 1710.03740, section 3.2). It moves as that of `torch.amp.GradScaler`, with two additions:
///
///   update(overflow = false)  after growth_interval such steps in a row, scale *= growth_factor, unless that is
///                             infinite in fp32
///   update(overflow = true)   the step was skipped; from the `hysteresis`-th such step in a row on,
///                             scale = max(scale * backoff_factor, minimum)
///
/// With hysteresis 1 and a minimum that is never reached, it is GradScaler. A static scale (dynamic = false) never
/// moves. Every rank holds one and must call update() with the same, agreed flag, so that all scales stay equal.
class LossScaler {
 public:
  explicit LossScaler(const LossScaleConfig& config);

  float scale() const { return state_.scale; }
  void update(bool overflow);

  const LossScalerState& state() const { return state_; }
  void restore(const LossScalerState& state) { state_ = state; }

 private:
  void back_off();
  void grow();

  LossScaleConfig config_;
  LossScalerState state_;
};

}  // namespace tessera
