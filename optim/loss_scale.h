#pragma once

#include "optim/arithmetic/loss_scale_rule.h"
#include "tessera/strategy.h"

namespace tessera {

/// Returns the rule of the factor by which the loss is multiplied before backward, so that small gradients survive fp16
/// (Micikevicius et al., arXiv 1710.03740, section 3.2). next_loss_scale changes the factor as `torch.amp.GradScaler`
/// does, with hysteresis and a minimum in addition:
///
///   overflow = false  after growth_interval such steps in a row, scale *= growth_factor, unless that is infinite in
///                     fp32
///   overflow = true   the step was skipped; from the `hysteresis`-th such step in a row on,
///                     scale = max(scale * backoff_factor, minimum)
///
/// If hysteresis is 1 and the minimum is never reached, the factor is that of GradScaler. A static scale (dynamic =
/// false) never changes. All ranks decide by the same, agreed flag, so that all scales stay equal.
inline LossScaleRule loss_scale_rule(const LossScaleConfig& config) {
  return {.growth_factor = config.growth_factor,
          .backoff_factor = config.backoff_factor,
          .minimum = config.minimum,
          .growth_interval = config.growth_interval,
          .hysteresis = config.hysteresis,
          .dynamic = config.dynamic};
}

/// Returns the state before the first step.
inline LossScalerState first_loss_scale(const LossScaleConfig& config) {
  return {.scale = static_cast<float>(config.initial)};
}

}  // namespace tessera
