#include "engine/step/cpu_step.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cmath>

#include "engine/step/step_outcome.h"
#include "optim/clip.h"
#include "optim/lr_schedule.h"

namespace tessera {

CpuStep::CpuStep(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& axes,
                 const Reducer& reducer, GradientNorm& norm, const Strategy& strategy, const Optimizer& optimizer,
                 StateRecords* records)
    : strategy_(strategy),
      microbatches_(static_cast<double>(axes.world->size() * strategy.gradient_accumulation)),
      scales_loss_(strategy.mixed_precision.param == DType::kF16),
      agreement_(units, plan, axes, reducer, norm),
      update_(units, optimizer, plan, axes, records),
      scaler_(strategy.mixed_precision.loss_scale) {}

LossSeed CpuStep::seed_of(const at::Tensor& loss) const {
  const double scale = loss_scale();
  const double seed = loss.scalar_type() == at::kHalf ? std::min(scale, kMostFp16Seed) : scale;
  LossSeed result{at::full_like(loss, seed), {}};
  if (seed != scale) result.factor = at::full({}, scale / seed, at::kFloat);
  return result;
}

void CpuStep::add_loss(const at::Tensor& loss, std::int64_t microbatches) {
  loss_ += loss.item<double>() / static_cast<double>(microbatches);
}

void CpuStep::run(const LocalStep& local, StepResult& result) {
  LocalStep told = local;
  told.loss = loss_;
  loss_ = 0;
  const AgreedStep& agreed = agreement_.agree(told);
  used_ = &agreed.used;
  result.loss = agreed.loss;
  result.tokens = agreed.tokens;
  result.loss_scale = loss_scale();
  result.overflow = !agreed.finite || !std::isfinite(agreed.sum_of_squares);
  result.lr = lr_at(strategy_.lr_schedule, strategy_.optimizer.lr, applied_, agreed.samples);
  const double mean = 1.0 / (microbatches_ * result.loss_scale);
  result.grad_norm = std::sqrt(agreed.sum_of_squares) * mean;
  if (result.overflow) {
    warn_of_overflow(result.step, result.loss_scale);
  } else {
    const double clip = clip_factor(result.grad_norm, strategy_.gradient_clipping);
    update_.apply(static_cast<float>(mean * clip), static_cast<float>(result.lr), agreed.used);
    ++applied_;
  }
  if (scales_loss_) scaler_.update(result.overflow);
}

StepProgress CpuStep::progress() const {
  StepProgress progress{applied_, scaler_.state(), {}};
  update_.write_counts(progress.updates);
  return progress;
}

void CpuStep::resume(const StepProgress& progress) {
  applied_ = progress.applied;
  scaler_.restore(progress.scaler);
  update_.read_counts(progress.updates);
}

double CpuStep::communication_seconds() const { return agreement_.exchange_seconds() + update_.publish_seconds(); }

}  // namespace tessera
