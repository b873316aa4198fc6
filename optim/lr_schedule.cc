#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera {
namespace {

// Returns the position of `step` between `begin` and `end`, as a number in [0, 1]; 1 for an empty interval.
double share_of(double step, double begin, double end) {
  return end > begin ? std::clamp((step - begin) / (end - begin), 0.0, 1.0) : 1.0;
}

double linear(double from, double to, double share) { return from + (to - from) * share; }

double cosine(double from, double to, double share) {
  return to + (from - to) * 0.5 * (1.0 + std::cos(std::numbers::pi * share));
}

double one_cycle_ratio(const LrScheduleConfig& config, double step) {
  const auto total = static_cast<double>(config.total_steps);
  const double rise_end =
      config.warmup_steps > 0 ? static_cast<double>(config.warmup_steps) : config.warmup_share * total - 1.0;
  if (rise_end > 0.0 && step <= rise_end) return cosine(config.initial_ratio, 1.0, step / rise_end);
  return cosine(1.0, config.min_ratio, share_of(step, std::max(rise_end, 0.0), total - 1.0));
}

double ratio_at(const LrScheduleConfig& config, double step) {
  if (config.type == LrScheduleType::kManual) return 1.0;
  if (config.type == LrScheduleType::kOneCycle) return one_cycle_ratio(config, step);
  const auto warmup = static_cast<double>(config.warmup_steps);
  if (step < warmup && config.warmup_from > 0) return linear(config.warmup_from, 1.0, step / warmup);
  if (step < warmup) return (step + 1.0) / (warmup + 1.0);
  const auto total = static_cast<double>(config.total_steps);
  const double share = share_of(step, warmup, total);
  switch (config.type) {
    case LrScheduleType::kConstant:
      return 1.0;
    case LrScheduleType::kLinear:
      return linear(1.0, config.min_ratio, share);
    case LrScheduleType::kCosine:
      return cosine(1.0, config.min_ratio, share);
    case LrScheduleType::kInverseSqrt:
      return std::max(config.min_ratio, std::sqrt((warmup + 1.0) / (step + 1.0)));
    case LrScheduleType::kWsd: {
      if (config.decay_steps <= 0) return 1.0;
      const double decay_begin = total - static_cast<double>(config.decay_steps);
      return linear(1.0, config.min_ratio, share_of(step, std::max(decay_begin, warmup), total));
    }
    case LrScheduleType::kManual:
    case LrScheduleType::kOneCycle:
      break;  // these types were handled above
  }
  return 1.0;
}

}  // namespace

double lr_ratio_at(const LrScheduleConfig& config, std::int64_t step) {
  return ratio_at(config, static_cast<double>(step));
}

BatchScale batch_scale(const LrScheduleConfig& config) {
  return {config.base_batch_size, config.batch_scaling == BatchScaling::kSquareRoot};
}

SampleWarmUp sample_warm_up(const LrScheduleConfig& config) {
  if (config.warmup_epochs <= 0) return {config.warmup_samples, config.warmup_from};
  return {std::llround(config.warmup_epochs * static_cast<double>(config.epoch_samples)), config.warmup_from};
}

double lr_at(const LrScheduleConfig& config, double base_lr, std::int64_t step, std::int64_t global_batch,
             std::int64_t seen) {
  const double ratio = lr_ratio_at(config, step) * warm_up_ratio(sample_warm_up(config), seen, global_batch);
  return scaled_lr(base_lr, batch_scale(config), global_batch, ratio);
}

}  // namespace tessera
