#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/loss_spikes.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/step.h"
#include "optim/arithmetic/step_decision.h"
#include "optim/arithmetic/weighted_mean.h"
#include "optim/loss_scale.h"
#include "optim/lr_schedule.h"
#include "tessera/engine.h"
#include "tessera/strategy.h"

namespace tessera {

/// Returns the numbers that stay the same in all decisions of a run. Rate and warm-up are missing, since they may
/// change. `microbatches`: number of microbatches of a step on all ranks. `replicas`: StepContext::replicas.
inline DecisionRule decision_rule(const Strategy& strategy, std::int64_t microbatches, int replicas) {
  DecisionRule rule;
  rule.microbatches = static_cast<double>(microbatches);
  rule.max_norm = strategy.gradient_clipping;
  rule.noise_smoothing = strategy.noise_scale.smoothing;
  rule.batch_scale = batch_scale(strategy.lr_schedule);
  rule.replicas = replicas;
  if (strategy.mixed_precision.param == DType::kF16)
    rule.loss_scale = loss_scale_rule(strategy.mixed_precision.loss_scale);
  if (strategy.on_spike.action != SpikeAction::kNone) rule.spikes = LossSpikes(strategy.on_spike).rule();
  return rule;
}

/// Returns the rate of the step after `latest`: see Step::lr.
inline double next_lr(const Strategy& strategy, const StepDecision& latest, std::int64_t replicas,
                      const LearningRates& rates, std::optional<std::size_t> group) {
  const LrScheduleConfig& schedule = strategy.lr_schedule;
  const double ratio = lr_ratio_at(schedule, latest.so_far.applied) *
                       warm_up_ratio(sample_warm_up(schedule), latest.so_far.samples, latest.samples * replicas);
  return rates.of(rates.everybodys() * ratio, group.value_or(FlatParameter::kNoGroup));
}

/// Returns the progress after `latest`, without counts of updates and losses.
inline StepProgress progress_of(const StepDecision& latest, const LearningRates& rates, const UpdateOptions& options) {
  StepProgress progress{latest.so_far.applied,
                        latest.scaler,
                        {},
                        {rates.all().begin(), rates.all().end()},
                        {options.all().begin(), options.all().end()}};
  progress.noise = latest.noise;
  progress.samples = latest.so_far.samples;
  return progress;
}

/// Takes from `progress` the numbers that progress_of wrote.
inline void resume(const StepProgress& progress, const Strategy& strategy, StepDecision& latest, LearningRates& rates,
                   UpdateOptions& options) {
  latest.so_far.applied = progress.applied;
  latest.so_far.samples = progress.samples;
  latest.scaler = progress.scaler;
  if (strategy.noise_scale.every > 0) latest.noise = progress.noise;
  if (!progress.rates.empty()) rates.restore(progress.rates);
  if (!progress.options.empty()) options.restore(progress.options);
}

/// Writes loss, tokens, the norm of the mean gradient, and whether gradients are not finite. The function is for a
/// decision of some ranks only (LoneStep): the ranks whose gradients came first ("sync" backups), or one rank alone.
/// `microbatches`: number of microbatches of a step on these ranks. REQUIRES: result.loss_scale is set.
inline void tell_agreed(const AgreedStep& agreed, double microbatches, StepResult& result) {
  result.loss = mean_loss(agreed.loss, microbatches, agreed.weight);
  result.tokens = agreed.tokens;
  result.overflow = !agreed.finite || !std::isfinite(agreed.sum_of_squares);
  result.grad_norm = std::sqrt(agreed.sum_of_squares) * mean_factor(agreed.weight, result.loss_scale);
}

/// Returns the rates of an update by a CPU. `applied`: number of earlier steps that updated parameters.
inline UpdateRates update_rates(const Strategy& strategy, double gradient_scale, double lr, std::int64_t applied) {
  return {static_cast<float>(gradient_scale), static_cast<float>(strategy.gradient_clip_value), lr,
          /*is_first_of_run=*/applied == 0};
}

}  // namespace tessera
