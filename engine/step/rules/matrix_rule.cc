#include "engine/step/rules/matrix_rule.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/memory/state_views.h"
#include "engine/step/rules/orthogonalize.h"
#include "optim/arithmetic/scaled_gradient.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

/// Returns the factor by which an orthogonal matrix is multiplied before the update.
float factor_of(const MuonConfig& muon, const FlatParameter& parameter) {
  const auto rows = static_cast<double>(parameter.sizes[0]), columns = static_cast<double>(parameter.sizes[1]);
  const bool is_original = muon.adjust_lr == MuonLrAdjustment::kOriginal;
  return static_cast<float>(is_original ? std::sqrt(std::max(1.0, rows / columns))
                                        : 0.2 * std::sqrt(std::max(rows, columns)));
}

}  // namespace

MatrixRule::MatrixRule(const Strategy& strategy, std::shared_ptr<const TensorRule> rule, ComputeDevice device)
    : muon_(strategy.optimizer.muon), device_(device), rule_(std::move(rule)) {
  const auto add = [&](const OptimizerConfig& config) {
    weight_decays_.push_back(config.weight_decay);
    if (rule_) {
      assigners_.push_back(std::make_unique<MasterAssigner>(config, strategy.ema));
    } else {
      directions_.push_back(std::make_unique<MuonOptimizer>(config, strategy.ema));
    }
  };
  const OptimizerConfig& optimizer = strategy.optimizer;
  add(optimizer);
  for (const ParameterGroup& group : optimizer.groups) add(config_of(optimizer, group));
}

void MatrixRule::follow(const UpdateOptions& options) {
  for (std::size_t i = 0; i < weight_decays_.size(); ++i) {
    const OptimizerConfig config = options.of(i - 1);
    weight_decays_[i] = config.weight_decay;
    if (!rule_) directions_[i]->set_numbers(config);
  }
}

void MatrixRule::make_directions(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                                 std::size_t config) const {
  directions_[config + 1]->direction(scalars, slice, gradients_of(group, slice));
}

const Optimizer& MatrixRule::optimizer_of(std::size_t config) const {
  if (rule_) return *assigners_[config + 1];
  return *directions_[config + 1];
}

StepArguments MatrixRule::step_arguments(const OptimizerSlice& slice) const {
  return rule_ ? assigners_[0]->arguments(slice) : directions_[0]->step_arguments(slice);
}

void MatrixRule::compute(const FlatGroup& group, std::size_t i, const WholeMatrix& whole,
                         const Numbers* numbers) const {
  if (rule_) return apply_rule(group, i, whole, *numbers);
  orthogonalize_matrix(group, i, whole);
}

void MatrixRule::orthogonalize_matrix(const FlatGroup& group, std::size_t i, const WholeMatrix& whole) const {
  orthogonalize(whole.gradient.data(), group.matrices[i], muon_.ns_steps, whole.work, muon_.ns_dtype, device_.device);
  const Unrecorded unrecorded;
  flat_view(whole.gradient.data(), DType::kF32, group.layout.extent(i).numel, device_.device)
      .mul_(factor_of(muon_, group.parameters[i]));
}

/// Applies scaled_gradient to each element.
void MatrixRule::scale(std::span<float> gradient, const UpdateRates& rates) const {
  if (!device_.is_queued) {
    for (float& g : gradient) g = scaled_gradient(g, rates.gradient_scale, rates.clip_value);
    return;
  }
  const Unrecorded unrecorded;
  at::Tensor there =
      flat_view(gradient.data(), DType::kF32, static_cast<std::int64_t>(gradient.size()), device_.device);
  there.mul_(rates.gradient_scale);
  if (rates.clip_value > 0) there.clamp_(-rates.clip_value, rates.clip_value);
}

void MatrixRule::apply_rule(const FlatGroup& group, std::size_t i, const WholeMatrix& whole,
                            const Numbers& numbers) const {
  const FlatParameter& parameter = group.parameters[i];
  scale(whole.gradient, numbers.rates);
  WholeTensor tensor{parameter, whole.masters, whole.gradient, {}, {}, numbers.lr, 0, numbers.step};
  tensor.weight_decay = weight_decays_[parameter.group + 1];
  if (!group.tensor_states.empty()) {
    const std::int64_t first = group.tensor_states.extent_of(i).offset;
    const std::size_t begin = group.tensor_states.first[i], count = group.tensor_states.first[i + 1] - begin;
    tensor.state_shapes = std::span(group.of_tensors.shapes).subspan(begin, count);
    for (std::size_t k = 0; k < count; ++k) {
      const Extent place = group.tensor_states.layout.extent(begin + k);
      tensor.states[k] =
          whole.states.subspan(static_cast<std::size_t>(place.offset - first), static_cast<std::size_t>(place.numel));
    }
  }
  rule_->update(tensor);
}

}  // namespace tessera
