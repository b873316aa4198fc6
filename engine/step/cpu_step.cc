#include "engine/step/cpu_step.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cmath>

#include "engine/step/agree/step_outcome.h"
#include "engine/step/agreed_numbers.h"
#include "optim/arithmetic/clip.h"
#include "optim/arithmetic/weighted_mean.h"
#include "optim/lr_schedule.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

/// Throws for a gradient of `group` that is not finite. The step cannot be skipped any more, since the units before
/// this one are updated already.
[[noreturn]] void throw_not_finite(const FlatGroup& group) {
  std::string name = "unit " + group.unit->name;
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const Extent part = intersect(group.layout.extent(i), group.gradient_part);
    const float* const values = group.gradient + (part.offset - group.gradient_part.offset);
    if (std::all_of(values, values + part.numel, [](float value) { return std::isfinite(value); })) continue;
    name = "parameter " + group.parameters[i].name;
    break;
  }
  throw_not_finite_in_backward("", name);
}

}  // namespace

CpuStep::CpuStep(const StepContext& context, GradientNorm& norm)
    : strategy_(context.strategy),
      units_(context.units),
      speaks_(context.axes.world->rank() == 0),
      first_rank_(context.first_rank),
      norm_(norm),
      microbatches_(static_cast<double>(microbatch_order(strategy_, context.axes.world->size()).all())),
      each_(microbatches_ / static_cast<double>(context.axes.world->size())),
      scales_loss_(strategy_.mixed_precision.param == DType::kF16),
      agreement_(context, norm),
      stragglers_(static_cast<std::size_t>(context.axes.world->size()), first_rank_),
      update_(context),
      scaler_(strategy_.mixed_precision.loss_scale),
      noise_(strategy_.noise_scale.smoothing),
      replicas_(context.replicas) {
  if (strategy_.on_spike.action != SpikeAction::kNone) spikes_.emplace(strategy_.on_spike);
  if (!strategy_.reproducible) return;
  const MicrobatchOrder order = microbatch_order(strategy_, context.axes.world->size());
  losses_.of_rounds.resize(static_cast<std::size_t>(order.most_rounds()));
  const Placement& placement = context.plan.placement();
  recorder_ = StepRecorder::make(strategy_, units_, *context.axes.world,
                                 {.gradients = owners_of_parts(placement.gradients, context.axes),
                                  .masters = owners_of_parts(placement.optimizer, context.axes)});
}

LossSeed CpuStep::seed_of(const at::Tensor& loss, double weight) const {
  const double scale = loss_scale();
  const double seed = loss.scalar_type() == at::kHalf ? std::min(scale, kMostFp16Seed) : scale;
  LossSeed result{at::full_like(loss, seed), {}};
  if (seed != scale) result.factor = at::full({}, scale / seed, at::kFloat);
  weigh(result, weight);
  return result;
}

void CpuStep::add_loss(const at::Tensor& loss, double weight, std::int64_t round) {
  const double weighted = weight * loss.item<double>();
  losses_.sum += weighted / each_;
  if (recorder_) recorder_->end_backward(loss, round);
  if (losses_.of_rounds.empty()) return;
  MicrobatchLoss& microbatch = losses_.of_rounds[static_cast<std::size_t>(round)];
  microbatch.loss += weighted;
  microbatch.weight = weight;  // all losses of a microbatch have the same weight
}

void CpuStep::pass_over_loss() {
  if (recorder_) recorder_->pass_over_backward();
}

void CpuStep::forget_losses() {
  if (recorder_) recorder_->drop_microbatches();
  losses_.sum = 0;
  std::fill(losses_.of_rounds.begin(), losses_.of_rounds.end(), MicrobatchLoss());
}

double CpuStep::scheduled_lr(std::int64_t samples) const {
  return lr_at(strategy_.lr_schedule, update_.learning_rates().everybodys(), done_.applied, samples * replicas_,
               done_.samples);
}

double CpuStep::lr(std::optional<std::size_t> group) const {
  const LrScheduleConfig& schedule = strategy_.lr_schedule;
  const double ratio =
      lr_ratio_at(schedule, done_.applied) * warm_up_ratio(sample_warm_up(schedule), done_.samples, done_.batch);
  const double everybodys = update_.learning_rates().everybodys() * ratio;
  return update_.learning_rates().of(everybodys, group.value_or(FlatParameter::kNoGroup));
}

Update::Rates CpuStep::rates(double gradient_scale, double lr) const {
  return update_rates(strategy_, gradient_scale, lr, done_.applied);
}

void CpuStep::read_ahead() { update_.read_ahead(); }

void CpuStep::deal(const MicrobatchOrder& order) {
  agreement_.deal(order);
  if (recorder_) recorder_->deal(order);
}

void CpuStep::update(Unit& unit, const UnitAgreement& agreed) {
  if (!agreed.ranks_agree) throw_disagreement_in_backward(unit.name);
  for (const auto& group : unit.groups) {
    if (group->trainable && !norm_.sums_of(*group).finite()) throw_not_finite(*group);
  }
  update_.apply(unit, rates(mean_factor(agreed.weight, 1.0), scheduled_lr(agreed.samples)), agreed.used);
}

void CpuStep::run(const LocalStep& local, StepResult& result) {
  LocalStep told = local;
  told.loss = losses_.sum;
  told.rates = update_.learning_rates().all();
  told.options = update_.options().all();
  const AgreedStep& agreed = agreement_.agree(told, losses_.of_rounds);
  if (recorder_) recorder_->begin_update(result.step);
  forget_losses();
  agreed_.used = &agreed.used;
  agreed_.busy_seconds = agreed.busy_seconds;
  const WaitedFor waited = waited_for(agreed.busy_seconds, first_rank_);
  result.waited_for_rank = waited.rank;
  result.waited_for_seconds = waited.seconds;
  const std::string slow = stragglers_.add(agreed.busy_seconds);
  if (speaks_ && !slow.empty()) log_warning("step " + std::to_string(result.step) + ": " + slow);
  result.loss_scale = loss_scale();
  const double mean = tell_agreed(agreed, microbatches_, result);
  result.spike = !result.overflow && is_spike(result);
  done_.batch = agreed.samples * replicas_;
  result.lr = scheduled_lr(agreed.samples);
  measure_noise(agreed, result);
  if (strategy_.optimizer.in_backward) {
    update_.finish();
    count_step();
  } else if (result.overflow) {
    warn_of_overflow(result.step, result.loss_scale, not_finite(agreed));
  } else if (!result.spike) {
    const double clip = clip_factor(result.grad_norm, strategy_.gradient_clipping);
    update_.apply(rates(mean * clip, result.lr), agreed.used, agreed.squares);
    count_step();
  }
  if (scales_loss_ && !result.spike) scaler_.update(result.overflow);
  if (recorder_) recorder_->end_step(result);
}

/// A step that is skipped does not measure noise.
void CpuStep::measure_noise(const AgreedStep& agreed, StepResult& result) {
  if (agreed.own.weights > 0 && !result.overflow && !result.spike) {
    const double batch = agreed.samples > 0 ? static_cast<double>(agreed.samples) : agreed.weight;
    noise_.add({agreed.own, agreed.sum_of_squares, agreed.weight, batch, result.loss_scale});
  }
  result.noise_scale = noise_.scale();
  result.noise_batch = noise_.batch();
  result.noise_square = noise_.square();
  result.noise_variance = noise_.variance();
}

bool CpuStep::is_spike(const StepResult& result) {
  if (!spikes_) return false;
  const SpikeVerdict verdict = spikes_->add(result.loss);
  if (speaks_ || verdict == SpikeVerdict::kNegative) {
    report_spike(strategy_.on_spike, verdict, result.step, result.loss, spikes_->median());
  }
  return verdict == SpikeVerdict::kSpike;
}

std::string CpuStep::not_finite(const AgreedStep& agreed) const {
  constexpr std::size_t kMostNamed = 3;
  std::vector<std::string> names;
  for_each_parameter(units_, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    if (!group.trainable || std::isfinite(agreed.squares[static_cast<std::size_t>(parameter.number)])) return;
    names.push_back(parameter.name);
  });
  const std::size_t more = names.size() > kMostNamed ? names.size() - kMostNamed : 0;
  names.resize(names.size() - more);
  return joined(names) + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

StepProgress CpuStep::progress() const {
  const std::span<const double> rates = update_.learning_rates().all();
  const std::span<const double> options = update_.options().all();
  StepProgress progress{
      done_.applied, scaler_.state(), {}, {rates.begin(), rates.end()}, {options.begin(), options.end()}};
  update_.write_counts(progress.updates);
  if (spikes_) progress.losses = spikes_->history();
  progress.noise = noise_.state();
  progress.samples = done_.samples;
  return progress;
}

void CpuStep::resume(const StepProgress& progress) {
  done_.applied = progress.applied;
  done_.samples = progress.samples;
  scaler_.restore(progress.scaler);
  update_.read_counts(progress.updates);
  if (spikes_) spikes_->restore(progress.losses);
  if (strategy_.noise_scale.every > 0) noise_.restore(progress.noise);
  if (!progress.rates.empty()) update_.learning_rates().restore(progress.rates);
  if (!progress.options.empty()) update_.options().restore(progress.options);
}

double CpuStep::communication_seconds() const {
  return agreement_.exchange_seconds() + update_.communication_seconds();
}

}  // namespace tessera
