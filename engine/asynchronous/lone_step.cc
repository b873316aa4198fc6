#include "engine/asynchronous/lone_step.h"

#include <ATen/ops/full_like.h>

#include <utility>

#include "engine/asynchronous/pulled_parameters.h"
#include "engine/step/agreed_numbers.h"
#include "optim/arithmetic/clip.h"
#include "optim/arithmetic/weighted_mean.h"
#include "optim/lr_schedule.h"

namespace tessera {
namespace {

/// Returns the copies of a GPU's values and gradients; null on the CPU.
HostCopies* copies_of(CommonParameters& common) {
  PulledParameters* const pulled = common.pulled();
  return pulled && pulled->copies().are_apart() ? &pulled->copies() : nullptr;
}

}  // namespace

LoneStep::LoneStep(const StepContext& context, GradientNorm& norm, CommonParameters& common)
    : strategy_(context.strategy),
      units_(context.units),
      common_(common),
      copies_(copies_of(common)),
      norm_(norm),
      reducer_(context.reducer),
      microbatches_(static_cast<double>(strategy_.gradient_accumulation)),
      agreement_(context, norm),
      rates_(strategy_.optimizer),
      options_(strategy_.optimizer),
      rule_(strategy_, context.own_rules, rates_) {
  std::size_t parameters = 0;
  for_each_trainable(units_, [&](const FlatGroup& group) { parameters += group.parameters.size(); });
  own_used_.resize(parameters);
}

void LoneStep::expect_update(std::span<const int>) {
  is_last_backward_ = true;
  if (copies_) copies_->forget_gradients();
}

void LoneStep::reduced(const Unit& unit) {
  if (copies_ && is_last_backward_) copies_->fetch(unit);
}

void LoneStep::note_used() {
  auto flag = own_used_.begin();
  for_each_trainable(units_, [&](const FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) *flag++ = reducer_.used(group, i) ? 1 : 0;
  });
  used_ = &own_used_;
}

LossSeed LoneStep::seed_of(const at::Tensor& loss, double weight) const {
  LossSeed result{at::full_like(loss, 1.0), {}};
  weigh(result, weight);
  return result;
}

void LoneStep::add_loss(const at::Tensor& loss, double weight, std::int64_t) {
  loss_ += weight * loss.item<double>() / microbatches_;
}

void LoneStep::update(Unit& unit, const UnitAgreement&) {
  TORCH_INTERNAL_ASSERT(false, "unit ", unit.name,
                        ": steps of ranks with common parameters update nothing in backward");
}

void LoneStep::swap_averages() {
  TORCH_INTERNAL_ASSERT(false, "steps of ranks with common parameters have no averages of weights");
}

double LoneStep::lr(std::optional<std::size_t> group) const {
  const double everybodys = lr_at(strategy_.lr_schedule, rates_.everybodys(), applied(), /*samples=*/0);
  return rates_.of(everybodys, group.value_or(FlatParameter::kNoGroup));
}

LocalStep LoneStep::told_of(const LocalStep& local) {
  is_last_backward_ = false;
  if (copies_) copies_->await_gradients();
  LocalStep told = local;
  told.loss = std::exchange(loss_, 0.0);
  told.rates = rates_.all();
  told.options = options_.all();
  return told;
}

const AgreedStep& LoneStep::decide_alone(const LocalStep& told) {
  if (copies_) {  // on a GPU, reductions do not pass their sums to `norm_`
    for_each_trainable(units_, [&](const FlatGroup& group) {
      norm_.begin(group);
      norm_.visit(group, {copies_->gradient(group), static_cast<std::size_t>(group.gradient_part.numel)});
    });
  }
  return agreement_.agree(told, {});
}

void LoneStep::tell(const AgreedStep& agreed, std::int64_t ranks, StepResult& result) const {
  tell_agreed(agreed, microbatches_ * static_cast<double>(ranks), result);
  result.lr = lr_at(strategy_.lr_schedule, rates_.everybodys(), applied(), agreed.samples);
}

UpdateRates LoneStep::rates_for(double weight, const StepResult& result) const {
  const double clip = clip_factor(result.grad_norm, strategy_.gradient_clipping);
  return update_rates(strategy_, mean_factor(weight, /*scale=*/1.0) * clip, result.lr, applied());
}

const ShardRule& LoneStep::rule() {
  if (std::exchange(followed_, options_.version()) != options_.version()) rule_.follow(options_);
  return rule_;
}

StepProgress LoneStep::progress() const {
  StepProgress progress{
      applied(), {}, {}, {rates_.all().begin(), rates_.all().end()}, {options_.all().begin(), options_.all().end()}};
  progress.samples = samples_seen();
  for_each_trainable(units_, [&](const FlatGroup& group) {
    const std::span<const std::int64_t> counts = common_.counts(group);
    for (std::size_t i = 0; i < counts.size(); ++i)
      progress.updates[group.parameters[i].tensor.unsafeGetTensorImpl()] = counts[i];
  });
  return progress;
}

void LoneStep::resume(const StepProgress& progress) {
  applied_ = progress.applied;
  samples_ = progress.samples;
  for_each_trainable(units_, [&](const FlatGroup& group) {
    const std::span<std::int64_t> counts = common_.counts(group);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const auto found = progress.updates.find(group.parameters[i].tensor.unsafeGetTensorImpl());
      counts[i] = found == progress.updates.end() ? 0 : found->second;
    }
  });
  if (!progress.rates.empty()) rates_.restore(progress.rates);
  if (!progress.options.empty()) options_.restore(progress.options);
  common_.share_counts();
}

}  // namespace tessera
