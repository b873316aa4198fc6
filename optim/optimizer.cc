#include "optim/optimizer.h"

#include <tuple>

#include "optim/rule_optimizer.h"

namespace tessera {

StateFormats Optimizer::state_formats() const {
  StateFormats formats;
  for (const StateInfo& state : states()) formats.push_back(state.dtype);
  return formats;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config, const EmaConfig& ema) {
  return std::make_unique<RuleOptimizer>(config, ema);
}

OptimizerConfig config_of(const OptimizerConfig& optimizer, const ParameterGroup& group) {
  OptimizerConfig config = optimizer;
  config.groups.clear();
  config.weight_decay = group.weight_decay.value_or(optimizer.weight_decay);
  config.eps = group.eps.value_or(optimizer.eps);
  if (group.betas) std::tie(config.beta1, config.beta2) = *group.betas;
  return config;
}

}  // namespace tessera
