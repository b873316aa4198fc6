#include "engine/step/agree/learning_rates.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sharding/unit.h"

namespace tessera {

LearningRates::LearningRates(const OptimizerConfig& optimizer) {
  for (const ParameterGroup& group : optimizer.groups) ratios_.push_back(group.lr_ratio);
  rates_.resize(1 + ratios_.size());
  set(optimizer.lr, std::nullopt);
}

void LearningRates::set(double lr, std::optional<std::size_t> group) {
  if (!group) std::ranges::fill(rates_, std::numeric_limits<double>::quiet_NaN());
  rates_[group ? 1 + *group : 0] = lr;
}

double LearningRates::of(double scheduled, std::size_t group) const {
  if (group == FlatParameter::kNoGroup) return scheduled;
  const double own = rates_[1 + group];
  return std::isnan(own) ? scheduled * ratios_[group] : own;
}

}  // namespace tessera
