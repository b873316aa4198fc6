#include "engine/step/rules/layerwise_update.h"

#include <cmath>

namespace tessera {

LayerwiseUpdate::LayerwiseUpdate(const StepContext& context)
    : in_backward_(context.plan.update().in_backward),
      norms_(context.units, context.plan.placement().optimizer, context.axes,
             {.of_updates = in_backward_ || makes_direction(rule_of(context.strategy.optimizer.type)),
              .by_unit = in_backward_}) {
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
    if (!directions.empty()) return norms_.add_update(group, first, directions);
    if (in_backward_) norms_.add_update(group, first, slice.gradient.subspan(begin, weights.size()));
  };
  optimizer_of(config).measure(scalars, slice, gradients_of(group, slice), add);
}

void LayerwiseUpdate::agree(std::optional<std::int32_t> unit, std::span<const double> squares, double gradient_scale) {
  squares_ = squares;
  gradient_scale_ = gradient_scale;
  norms_.agree(unit);
}

/// Returns the norm of a parameter's update. lars uses the norm of the gradient. Updates in backward take it from
/// `norms_`, and other updates from the agreement; both are sums over the same tree.
double LayerwiseUpdate::norm_of_update(const LayerwiseOptimizer& optimizer, std::int64_t number) const {
  if (optimizer.makes_directions()) return norms_.update(number);
  const double norm = in_backward_ ? norms_.update(number) : std::sqrt(squares_[static_cast<std::size_t>(number)]);
  return norm * gradient_scale_;
}

/// Updates one parameter after another, since each parameter has its own rate. Padding between parameters does not
/// change.
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
      own.lr =
          static_cast<float>(own.lr * optimizer.trust_ratio(norms_.weights(number), norm_of_update(optimizer, number)));
    }
    optimizer.step(own, slice, static_cast<std::size_t>(part.offset - run.offset),
                   static_cast<std::size_t>(part.numel));
  }
}

}  // namespace tessera
