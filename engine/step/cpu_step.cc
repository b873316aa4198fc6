#include "engine/step/cpu_step.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cmath>

#include "engine/step/agree/step_outcome.h"
#include "engine/step/agreed_numbers.h"
#include "optim/arithmetic/weighted_mean.h"
#include "optim/loss_scale.h"
#include "optim/lr_schedule.h"
#include "optim/step_decision.h"
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
      rule_(decision_rule(strategy_, microbatch_order(strategy_, context.axes.world->size()).all(), context.replicas)),
      each_(rule_.microbatches / static_cast<double>(context.axes.world->size())),
      scales_loss_(strategy_.mixed_precision.param == DType::kF16),
      agreement_(context, norm),
      stragglers_(static_cast<std::size_t>(context.axes.world->size()), first_rank_),
      update_(context) {
  latest_.scaler = first_loss_scale(strategy_.mixed_precision.loss_scale);
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

double CpuStep::lr_ratio() const { return lr_ratio_at(strategy_.lr_schedule, applied()); }

double CpuStep::lr(std::optional<std::size_t> group) const {
  return next_lr(strategy_, latest_, rule_.replicas, update_.learning_rates(), group);
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
  const double lr = lr_at(strategy_.lr_schedule, update_.learning_rates().everybodys(), applied(),
                          agreed.samples * rule_.replicas, samples_seen());
  update_.apply(unit, update_rates(strategy_, mean_factor(agreed.weight, 1.0), lr, applied()), agreed.used);
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
  decide(agreed, result.step);
  tell(latest_, result);
  if (strategy_.optimizer.in_backward) {
    update_.finish();
  } else if (result.overflow) {
    warn_of_overflow(result.step, result.loss_scale, not_finite(agreed));
  } else if (!result.spike) {
    const std::int64_t before = applied() - 1;  // this step is counted already
    update_.apply(update_rates(strategy_, latest_.gradient_scale, result.lr, before), agreed.used, agreed.squares);
  }
  if (recorder_) recorder_->end_step(result);
}

void CpuStep::decide(const AgreedStep& agreed, std::int64_t step) {
  static_cast<AgreedSums&>(latest_) = agreed;
  latest_.own = agreed.own;
  const StepFacts facts{.sum_of_squares = agreed.sum_of_squares,
                        .is_finite = agreed.finite,
                        .loss_scale = static_cast<float>(loss_scale()),
                        .lr_ratio = lr_ratio(),
                        .median = spikes_ ? spikes_->median() : 0};
  rule_.base_lr = update_.learning_rates().everybodys();
  rule_.warm_up = sample_warm_up(strategy_.lr_schedule);
  tessera::decide(rule_, facts, spikes_ ? spikes_->losses().data() : nullptr, latest_);
  if (spikes_) spikes_->state() = latest_.spikes;
  if (speaks_ || latest_.spike == SpikeVerdict::kNegative)
    report_spike(strategy_.on_spike, latest_.spike, step, latest_.loss, facts.median);
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
  StepProgress progress = progress_of(latest_, update_.learning_rates(), update_.options());
  update_.write_counts(progress.updates);
  if (spikes_) progress.losses = spikes_->history();
  return progress;
}

void CpuStep::resume(const StepProgress& progress) {
  tessera::resume(progress, strategy_, latest_, update_.learning_rates(), update_.options());
  update_.read_counts(progress.updates);
  if (!spikes_) return;
  spikes_->restore(progress.losses);
  latest_.spikes = spikes_->state();
}

double CpuStep::communication_seconds() const {
  return agreement_.exchange_seconds() + update_.communication_seconds();
}

}  // namespace tessera
