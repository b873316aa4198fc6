#include "engine/step/rules/layerwise_rule.h"

namespace tessera {

LayerwiseRule::LayerwiseRule(const Strategy& strategy) {
  const auto add = [&](const OptimizerConfig& config, bool adapts) {
    optimizers_.push_back(std::make_unique<LayerwiseOptimizer>(config, strategy.ema));
    adapts_.push_back(adapts);
  };
  const OptimizerConfig& optimizer = strategy.optimizer;
  add(optimizer, true);
  for (const ParameterGroup& group : optimizer.groups) add(config_of(optimizer, group), group.layer_adaptation);
}

void LayerwiseRule::follow(const UpdateOptions& options) {
  for (std::size_t i = 0; i < optimizers_.size(); ++i) optimizers_[i]->set_numbers(options.of(i - 1));
}

/// Updates one parameter after another, since each parameter has its own rate. Padding between parameters does not
/// change.
void LayerwiseRule::step(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                         std::size_t config, c10::function_ref<LayerNormPair(std::size_t)> norms_of) const {
  const LayerwiseOptimizer& optimizer = optimizer_of(config);
  const Extent run{static_cast<std::int64_t>(slice.first_element), static_cast<std::int64_t>(slice.gradient.size())};
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const Extent part = intersect(group.layout.extent(i), run);
    if (part.numel == 0) continue;
    StepScalars own = scalars;
    if (adapts_[config + 1]) {
      const LayerNormPair norms = norms_of(i);
      own.lr = static_cast<float>(own.lr * optimizer.trust_ratio(norms.weights, norms.update));
    }
    optimizer.step(own, slice, static_cast<std::size_t>(part.offset - run.offset),
                   static_cast<std::size_t>(part.numel));
  }
}

}  // namespace tessera
