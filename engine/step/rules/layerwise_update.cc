#include "engine/step/rules/layerwise_update.h"

#include <algorithm>
#include <cmath>

namespace tessera {

LayerwiseUpdate::LayerwiseUpdate(const StepContext& context)
    : norms_(context.units, context.plan.input().placement.optimizer, context.axes,
             context.strategy.optimizer.type == OptimizerType::kLamb) {
  const auto add = [&](const OptimizerConfig& config, bool adapts) {
    optimizers_.push_back(std::make_unique<LayerwiseOptimizer>(config, context.strategy.ema));
    adapts_.push_back(adapts);
  };
  const OptimizerConfig& optimizer = context.strategy.optimizer;
  add(optimizer, true);
  for (const ParameterGroup& group : optimizer.groups) add(config_of(optimizer, group), group.layer_adaptation);
}

void LayerwiseUpdate::follow(const UpdateOptions& options) {
  for (std::size_t i = 0; i < optimizers_.size(); ++i) optimizers_[i]->set_numbers(options.of(i - 1));
}

void LayerwiseUpdate::measure(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                              std::size_t config) {
  const auto add = [&](std::size_t begin, std::span<const float> weights, std::span<const float> directions) {
    const auto first = static_cast<std::int64_t>(slice.first_element + begin);
    norms_.add_weights(group, first, weights);
    if (!directions.empty()) norms_.add_update(group, first, directions);
  };
  optimizer_of(config).measure(scalars, slice, gradients_of(group, slice), add);
}

void LayerwiseUpdate::agree(std::span<const double> squares, double gradient_scale) {
  squares_ = squares;
  gradient_scale_ = gradient_scale;
  norms_.agree();
}

/// Parameter by parameter, since each has a rate of its own. Padding between them stays as it is.
void LayerwiseUpdate::step(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                           std::size_t config) const {
  const LayerwiseOptimizer& optimizer = optimizer_of(config);
  const Extent run{static_cast<std::int64_t>(slice.first_element), static_cast<std::int64_t>(slice.gradient.size())};
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const Extent part = intersect(group.layout.extent(i), run);
    if (part.numel == 0) continue;
    StepScalars own = scalars;
    if (adapts_[config + 1]) {
      const std::int64_t number = group.parameters[i].number;
      const double update = optimizer.makes_directions()
                                ? norms_.update(number)
                                : std::sqrt(squares_[static_cast<std::size_t>(number)]) * gradient_scale_;
      own.lr = static_cast<float>(own.lr * optimizer.trust_ratio(norms_.weights(number), update));
    }
    optimizer.step(own, slice, static_cast<std::size_t>(part.offset - run.offset),
                   static_cast<std::size_t>(part.numel));
  }
}

}  // namespace tessera
