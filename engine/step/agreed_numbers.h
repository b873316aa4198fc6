#pragma once

// See docs/glossary.md: agreement.

#include <cmath>
#include <cstdint>

#include "engine/step/agree/step_agreement.h"
#include "engine/step/rules/element_update.h"
#include "optim/arithmetic/weighted_mean.h"
#include "tessera/engine.h"
#include "tessera/strategy.h"

namespace tessera {

// Numbers of a CPU's step that follow from the agreement of its ranks. The ranks that agree are all ranks (CpuStep),
// those whose gradients came first ("sync" backups), or one rank alone (LoneStep).

/// Writes loss, tokens, the norm of the mean gradient, and whether gradients are not finite. `microbatches`: number of
/// microbatches of a step on all these ranks. Returns the factor by which the sum of gradients becomes the mean
/// gradient. REQUIRES: result.loss_scale is set.
inline double tell_agreed(const AgreedStep& agreed, double microbatches, StepResult& result) {
  result.loss = mean_loss(agreed.loss, microbatches, agreed.weight);
  result.tokens = agreed.tokens;
  result.overflow = !agreed.finite || !std::isfinite(agreed.sum_of_squares);
  const double mean = mean_factor(agreed.weight, result.loss_scale);
  result.grad_norm = std::sqrt(agreed.sum_of_squares) * mean;
  return mean;
}

/// Returns the rates of an update. `applied`: number of earlier steps that updated parameters.
inline UpdateRates update_rates(const Strategy& strategy, double gradient_scale, double lr, std::int64_t applied) {
  return {static_cast<float>(gradient_scale), static_cast<float>(strategy.gradient_clip_value), lr,
          /*is_first_of_run=*/applied == 0};
}

}  // namespace tessera
