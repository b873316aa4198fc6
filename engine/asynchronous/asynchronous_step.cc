#include "engine/asynchronous/asynchronous_step.h"

#include <ATen/ops/full_like.h>

#include <cmath>
#include <string>
#include <utility>

#include "optim/arithmetic/clip.h"
#include "optim/arithmetic/weighted_mean.h"
#include "optim/lr_schedule.h"
#include "runtime/base/log.h"

namespace tessera {

AsynchronousStep::AsynchronousStep(const StepContext& context, GradientNorm& norm, CommonParameters& common)
    : strategy_(context.strategy),
      units_(context.units),
      common_(common),
      microbatches_(static_cast<double>(strategy_.gradient_accumulation)),
      agreement_(context, norm),
      rates_(strategy_.optimizer),
      options_(strategy_.optimizer),
      elements_(strategy_, context.own_rules, rates_) {}

LossSeed AsynchronousStep::seed_of(const at::Tensor& loss, double weight) const {
  LossSeed result{at::full_like(loss, 1.0), {}};
  weigh(result, weight);
  return result;
}

void AsynchronousStep::add_loss(const at::Tensor& loss, double weight, std::int64_t) {
  loss_ += weight * loss.item<double>() / microbatches_;
}

void AsynchronousStep::update(Unit& unit, const UnitAgreement&) {
  TORCH_INTERNAL_ASSERT(false, "unit ", unit.name, ": asynchronous steps update nothing in backward");
}

void AsynchronousStep::swap_averages() {
  TORCH_INTERNAL_ASSERT(false, "asynchronous steps have no averages of weights");
}

double AsynchronousStep::lr(std::optional<std::size_t> group) const {
  const double everybodys = lr_at(strategy_.lr_schedule, rates_.everybodys(), applied_, /*samples=*/0);
  return rates_.of(everybodys, group.value_or(FlatParameter::kNoGroup));
}

void AsynchronousStep::run(const LocalStep& local, StepResult& result) {
  LocalStep told = local;
  told.loss = std::exchange(loss_, 0.0);
  told.rates = rates_.all();
  told.options = options_.all();
  const AgreedStep& own = agreement_.agree(told, {});
  used_ = &own.used;
  result.loss = mean_loss(own.loss, microbatches_, own.weight);
  result.tokens = own.tokens;
  result.overflow = !own.finite || !std::isfinite(own.sum_of_squares);
  result.lr = lr_at(strategy_.lr_schedule, rates_.everybodys(), applied_, own.samples);
  const double mean = mean_factor(own.weight, /*scale=*/1.0);
  result.grad_norm = std::sqrt(own.sum_of_squares) * mean;
  if (result.overflow) {
    log_warning("step " + std::to_string(result.step) +
                ": a gradient is infinite or NaN; this rank skips the step, and others go on");
    return common_.skip();
  }
  if (std::exchange(followed_, options_.version()) != options_.version()) elements_.follow(options_);
  const double clip = clip_factor(result.grad_norm, strategy_.gradient_clipping);
  const UpdateRates rates{static_cast<float>(mean * clip), static_cast<float>(strategy_.gradient_clip_value), result.lr,
                          /*is_first_of_run=*/applied_ == 0};
  const GradientAges ages = common_.push(elements_, {rates, own.used});
  result.staleness_mean = ages.mean();
  result.staleness_max = ages.most;
  ++applied_;
}

StepProgress AsynchronousStep::progress() const {
  StepProgress progress{
      applied_, {}, {}, {rates_.all().begin(), rates_.all().end()}, {options_.all().begin(), options_.all().end()}};
  for_each_trainable(units_, [&](const FlatGroup& group) {
    const std::span<const std::int64_t> counts = common_.counts(group);
    for (std::size_t i = 0; i < counts.size(); ++i)
      progress.updates[group.parameters[i].tensor.unsafeGetTensorImpl()] = counts[i];
  });
  return progress;
}

void AsynchronousStep::resume(const StepProgress& progress) {
  applied_ = progress.applied;
  for_each_trainable(units_, [&](const FlatGroup& group) {
    const std::span<std::int64_t> counts = common_.counts(group);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const auto found = progress.updates.find(group.parameters[i].tensor.unsafeGetTensorImpl());
      counts[i] = found == progress.updates.end() ? 0 : found->second;
    }
  });
  if (!progress.rates.empty()) rates_.restore(progress.rates);
  if (!progress.options.empty()) options_.restore(progress.options);
  common_.board().meet("counts of asynchronous steps");
}

}  // namespace tessera
