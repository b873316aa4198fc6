#include "engine/step/rules/element_update.h"

namespace tessera {

ElementUpdate::ElementUpdate(const Strategy& strategy, const OwnRules& own_rules, const LearningRates& rates)
    : rates_(rates), averages_(strategy.ema.decay > 0.0) {
  static_assert(FlatParameter::kNoGroup + 1 == 0);
  const auto add = [&](const OptimizerConfig& config) {
    optimizers_.push_back(make_optimizer(config, strategy.ema, own_rules));
  };
  add(strategy.optimizer);
  for (const ParameterGroup& group : strategy.optimizer.groups) add(config_of(strategy.optimizer, group));
}

void ElementUpdate::follow(const UpdateOptions& options) {
  for (std::size_t i = 0; i < optimizers_.size(); ++i) optimizers_[i]->set_numbers(options.of(i - 1));
}

void ElementUpdate::find_runs(const FlatGroup& group, Extent part, std::span<const char> used, std::int64_t* steps,
                              std::vector<UpdateRun>& runs) const {
  const std::size_t count = group.parameters.size();
  const std::span<const char> takes_part = used.first(count);
  for (std::size_t i = 0; i < count; ++i) steps[i] += takes_part[i] ? 1 : 0;
  const auto is_visited = [&](std::size_t i) { return takes_part[i] || (averages_ && steps[i] > 0); };
  const auto goes_with = [&](std::size_t i, std::size_t j) {
    return is_visited(i) && is_visited(j) && takes_part[i] == takes_part[j] && steps[i] == steps[j] &&
           group.parameters[i].group == group.parameters[j].group;
  };
  for (std::size_t i = 0; i < count;) {
    std::size_t end = i + 1;
    while (end < count && goes_with(i, end)) ++end;
    const std::int64_t begin = i == 0 ? 0 : group.layout.extent(i).offset;
    const std::int64_t next = end == count ? group.layout.numel() : group.layout.extent(end).offset;
    const Extent run = intersect({begin, next - begin}, part);
    if (is_visited(i) && run.numel > 0) runs.push_back({run, steps[i], group.parameters[i].group, takes_part[i] != 0});
    i = end;
  }
}

StepScalars ElementUpdate::scalars_of(const UpdateRates& rates, const UpdateRun& run) const {
  const double lr = rates_.of(rates.lr, run.group);
  return {rates.gradient_scale, rates.clip_value, static_cast<float>(lr), run.step, rates.is_first_of_run};
}

void ElementUpdate::update(const Optimizer& optimizer, const OptimizerSlice& slice, const UpdateRates& rates,
                           const UpdateRun& run) const {
  if (!run.is_updated) return optimizer.average(slice);
  optimizer.step(scalars_of(rates, run), slice);
}

}  // namespace tessera
