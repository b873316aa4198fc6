#include "engine/step/agree/step_outcome.h"

#include <cstring>

#include "engine/step/agree/loss_spikes.h"
#include "optim/noise_scale.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "tessera/engine.h"

namespace tessera {

const StepDecision& StepOutcome::wait() {
  const bool in_backward = !context_->units.empty();
  if (!decision_) {
    end_->wait();
    const auto axes = context_->axes.lock();
    if (axes) throw_if_error(axes->status());
    std::memcpy(&decision_.emplace(), pinned_.get(), sizeof(StepDecision));
    for (const auto& interval : waits_) exposed_seconds_ += interval->seconds();
    waits_.clear();
    if (decision_->is_overflow && !in_backward) warn_of_overflow(step_, decision_->loss_scale, "");
    if (axes && axes->world->rank() == 0) report();
  }
  if (decision_->spike == SpikeVerdict::kNegative) report();
  if (decision_->numbers_differ) throw_other_numbers();
  const bool is_the_end = in_backward && decision_->is_skipped;
  if (decision_->gathers_differ || (is_the_end && !decision_->is_overflow)) throw_disagreement();
  if (is_the_end) {
    const int unit = decision_->not_finite_unit;
    throw_not_finite_in_backward("step " + std::to_string(step_) + ", or one shortly before: ",
                                 unit > 0 ? "unit " + context_->units[static_cast<std::size_t>(unit - 1)]
                                          : "a unit that another rank has a part of");
  }
  return *decision_;
}

void StepOutcome::report() const {
  report_spike(context_->spikes, decision_->spike, step_, decision_->loss, decision_->spikes.median);
}

void StepOutcome::throw_disagreement() const {
  throw Error(
      ExitCode::kInternal,
      "step " + std::to_string(step_) +
          ": ranks gathered units in different orders, so their values cannot be trusted. [T0295] hint: forward must "
          "use units in the same order on every rank; a branch on a rank's data may choose only among replicated "
          "parameters");
}

void StepOutcome::throw_other_numbers() const {
  throw Error(
      ExitCode::kUsage,
      "step " + std::to_string(step_) + ": rank 0 and rank " + std::to_string(decision_->numbers_differ) +
          " have different learning rates or options. [T0296] hint: all ranks call set_lr and set_option alike");
}

void throw_not_finite_in_backward(const std::string& when, const std::string& whose) {
  throw Error(
      ExitCode::kCorruptData,
      when + "the gradient of " + whose +
          " is infinite or NaN, and with optimizer.in_backward this step cannot be skipped: other units are "
          "updated already, and this rank's part of this one is not. [T0297] hint: take a lower learning rate; with "
          "optimizer.in_backward false such steps are skipped, and gradient_clipping is possible");
}

void throw_disagreement_in_backward(const std::string& unit) {
  throw Error(
      ExitCode::kInternal,
      "unit " + unit +
          ": ranks gathered units in different orders in forward, so their gradients cannot be trusted, and the "
          "unit is not updated. [T0278] hint: all ranks make Gathered guards, and use units in forward, in the same "
          "order; with optimizer.in_backward false the message names the first gather that differs");
}

void warn_of_overflow(std::int64_t step, double loss_scale, const std::string& parameters) {
  log_warning("step " + std::to_string(step) + ": " + (parameters.empty() ? "a gradient is" : "gradients are") +
              " infinite or NaN" + (parameters.empty() ? "" : " (" + parameters + ")") +
              "; the step is skipped on all ranks" +
              (loss_scale != 1.0 ? ", loss scale " + std::to_string(loss_scale) : std::string()));
}

void tell(const StepDecision& decided, StepResult& result) {
  result.loss = decided.loss;
  result.grad_norm = decided.grad_norm;
  result.lr = decided.lr;
  result.overflow = decided.is_overflow != 0;
  result.spike = decided.spike == SpikeVerdict::kSpike;
  result.loss_scale = decided.loss_scale;
  result.tokens = decided.tokens;
  const NoiseScale noise(decided.noise);
  result.noise_scale = noise.scale();
  result.noise_batch = noise.batch();
  result.noise_square = noise.square();
  result.noise_variance = noise.variance();
}

void StepResult::wait() {
  if (!outcome_) return;
  tell(outcome_->wait(), *this);
  communication_seconds = outcome_->exposed_seconds();
  tokens_per_second = static_cast<double>(tokens) / seconds;
  outcome_.reset();
}

bool StepResult::is_known() const { return !outcome_ || outcome_->is_known(); }

}  // namespace tessera
