#pragma once

#include <cstdint>

#include "optim/arithmetic/loss_scale_rule.h"
#include "tessera/strategy.h"

namespace tessera {

/// The factor by which the loss is multiplied before backward, so that small gradients survive fp16 (Micikevicius et
/// al., arXiv 1710.03740, section 3.2). It changes like the factor of `torch.amp.GradScaler`, with hysteresis and a
/// minimum in addition:
///
///   update(overflow = false)  after growth_interval such steps in a row, scale *= growth_factor, unless that is
///                             infinite in fp32
///   update(overflow = true)   the step was skipped; from the `hysteresis`-th such step in a row on,
///                             scale = max(scale * backoff_factor, minimum)
///
/// If hysteresis is 1 and the minimum is never reached, it behaves as GradScaler does. A static scale (dynamic = false)
/// never changes. Every rank has a LossScaler and must call update() with the same, agreed flag, so that all scales
/// stay equal.
class LossScaler {
 public:
  explicit LossScaler(const LossScaleConfig& config);

  float scale() const { return state_.scale; }
  /// It is called once in each step. `overflow`: whether the step was skipped because a gradient was not finite.
  void update(bool overflow) { next_loss_scale(rule_, state_, overflow); }

  const LossScaleRule& rule() const { return rule_; }
  const LossScalerState& state() const { return state_; }
  /// Continues from the state of a checkpoint.
  void restore(const LossScalerState& state) { state_ = state; }

 private:
  LossScaleRule rule_;
  LossScalerState state_;
};

}  // namespace tessera
