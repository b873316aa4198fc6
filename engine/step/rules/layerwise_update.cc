#include "engine/step/rules/layerwise_update.h"

#include <cmath>

namespace tessera {

LayerwiseUpdate::LayerwiseUpdate(const StepContext& context)
    : rule_(context.strategy),
      in_backward_(context.plan.update().in_backward),
      norms_(context.units, context.plan.placement().optimizer, context.axes,
             {.of_updates = in_backward_ || makes_direction(rule_of(context.strategy.optimizer.type)),
              .by_unit = in_backward_}) {}

void LayerwiseUpdate::measure(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                              std::size_t config) {
  const auto add = [&](std::size_t begin, std::span<const float> weights, std::span<const float> directions) {
    const auto first = static_cast<std::int64_t>(slice.first_element + begin);
    norms_.add_weights(group, first, weights);
    if (!directions.empty()) return norms_.add_update(group, first, directions);
    if (in_backward_) norms_.add_update(group, first, slice.gradient.subspan(begin, weights.size()));
  };
  rule_.optimizer_of(config).measure(scalars, slice, gradients_of(group, slice), add);
}

void LayerwiseUpdate::agree(std::optional<std::int32_t> unit, std::span<const double> squares, double gradient_scale) {
  squares_ = squares;
  gradient_scale_ = gradient_scale;
  norms_.agree(unit);
}

/// Returns the norm of a parameter's update. lars uses the norm of the gradient. Updates in backward take it from
/// `norms_`, and other updates from the agreement; both are sums over the same tree.
double LayerwiseUpdate::norm_of_update(std::size_t config, std::int64_t number) const {
  if (rule_.optimizer_of(config).makes_directions()) return norms_.update(number);
  const double norm = in_backward_ ? norms_.update(number) : std::sqrt(squares_[static_cast<std::size_t>(number)]);
  return norm * gradient_scale_;
}

void LayerwiseUpdate::step(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                           std::size_t config) const {
  rule_.step(group, slice, scalars, config, [&](std::size_t i) {
    const std::int64_t number = group.parameters[i].number;
    return LayerNormPair{norms_.weights(number), norm_of_update(config, number)};
  });
}

}  // namespace tessera
