#include "engine/step/rules/matrix_update.h"

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

/// Offloaded states of groups, while an update uses them; FlatGroup::of_tensors points to them. On the CPU they lie in
/// the records' own memory. On a GPU they lie in slots of the GPU's memory, and work on them is queued.
class HeldStates {
 public:
  explicit HeldStates(std::vector<FlatGroup*> groups) : groups_(std::move(groups)) {}
  ~HeldStates() {
    for (FlatGroup* group : groups_) group->of_tensors.data = nullptr;
  }
  HeldStates(const HeldStates&) = delete;
  HeldStates& operator=(const HeldStates&) = delete;

  void acquire(Carrier& carrier) {
    for (FlatGroup* group : groups_) {
      leases_.push_back(carrier.acquire(group->of_tensors.record, LeaseUse::kChange));
      group->of_tensors.data = reinterpret_cast<float*>(leases_.back().bytes().data());
    }
  }
  /// Stores the changed states, in the order that the plan of transfers assumes.
  void give_back() {
    for (Lease& lease : leases_) lease.give_back();
  }

 private:
  const std::vector<FlatGroup*> groups_;
  std::vector<Lease> leases_;
};

}  // namespace

MatrixUpdate::MatrixUpdate(const StepContext& context, std::shared_ptr<const TensorRule> rule, ComputeDevice device,
                           DeviceKernels* kernels)
    : units_(context.units),
      deal_(context.plan.passes().matrices),
      muon_(context.strategy.optimizer.muon),
      device_(device),
      rule_(std::move(rule)),
      states_(context.memory.tensor_state_carrier()) {
  const auto add = [&](const OptimizerConfig& config) {
    weight_decays_.push_back(config.weight_decay);
    if (rule_) {
      assigners_.push_back(std::make_unique<MasterAssigner>(config, context.strategy.ema));
    } else {
      directions_.push_back(std::make_unique<MuonOptimizer>(config, context.strategy.ema));
    }
  };
  const OptimizerConfig& optimizer = context.strategy.optimizer;
  add(optimizer);
  for (const ParameterGroup& group : optimizer.groups) add(config_of(optimizer, group));
  std::size_t count = 0;
  for_each_trainable(units_, [&](const FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i, ++count) {
      if (!group.matrices.empty()) parameters_.push_back(count);
    }
  });
  exchange_.emplace(context, rule_ ? assigners_[0].get() : nullptr, device_, kernels);
}

void MatrixUpdate::follow(const UpdateOptions& options) {
  for (std::size_t i = 0; i < weight_decays_.size(); ++i) {
    const OptimizerConfig config = options.of(i - 1);
    weight_decays_[i] = config.weight_decay;
    if (!rule_) directions_[i]->set_numbers(config);
  }
}

/// Returns the batches of a unit, or all batches. A unit has one batch, or none if none of its parameters is updated as
/// a matrix.
std::span<const MatrixBatch> MatrixUpdate::batches_of(std::optional<std::int32_t> unit) const {
  if (!unit) return deal_.batches();
  const MatrixBatch* const batch = deal_.batch_of(static_cast<std::size_t>(*unit));
  return {batch, batch ? std::size_t{1} : std::size_t{0}};
}

void MatrixUpdate::expect(std::optional<std::int32_t> unit) {
  if (!states_) return;
  std::vector<std::int64_t> records;
  for (const MatrixBatch& batch : batches_of(unit)) {
    for (const FlatGroup* group : offloaded_in(batch)) records.push_back(group->of_tensors.record);
  }
  if (!records.empty()) states_->announce(records);
}

std::vector<FlatGroup*> MatrixUpdate::offloaded_in(const MatrixBatch& batch) const {
  std::vector<FlatGroup*> groups;
  for (std::size_t unit = batch.begin_unit; unit < batch.end_unit; ++unit) {
    for (const auto& group : units_[unit]->groups) {
      if (group->of_tensors.record >= 0) groups.push_back(group.get());
    }
  }
  return groups;
}

void MatrixUpdate::make_directions(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                                   std::size_t config) const {
  directions_[config + 1]->direction(scalars, slice, gradients_of(group, slice));
}

const Optimizer& MatrixUpdate::optimizer_of(std::size_t config) const {
  if (rule_) return *assigners_[config + 1];
  return *directions_[config + 1];
}

StepArguments MatrixUpdate::step_arguments(const OptimizerSlice& slice) const {
  return rule_ ? assigners_[0]->arguments(slice) : directions_[0]->step_arguments(slice);
}

void MatrixUpdate::exchange(std::optional<std::int32_t> unit, const OfStep* step, VisitMasters visit_masters) {
  expect(unit);
  for (const MatrixBatch& batch : batches_of(unit)) exchange_batch(batch, step, visit_masters);
  if (states_) states_->flush();
}

void MatrixUpdate::exchange_batch(const MatrixBatch& batch, const OfStep* step, VisitMasters visit_masters) {
  HeldStates states(states_ ? offloaded_in(batch) : std::vector<FlatGroup*>());
  if (states_) states.acquire(*states_);
  exchange_->run(batch, visit_masters, [&](const DealtMatrix& matrix, const WholeMatrix& whole) {
    if (!step || step->used[parameter_of(matrix)]) compute(matrix, whole, step);
  });
  states.give_back();
}

std::size_t MatrixUpdate::parameter_of(const DealtMatrix& matrix) const {
  return parameters_[static_cast<std::size_t>(&matrix - deal_.matrices().data())];
}

void MatrixUpdate::compute(const DealtMatrix& matrix, const WholeMatrix& whole, const OfStep* step) const {
  if (rule_) return apply_rule(matrix, whole, *step);
  orthogonalize_matrix(matrix, units_[matrix.unit]->groups[matrix.group]->parameters[matrix.tensor], whole);
}

void MatrixUpdate::orthogonalize_matrix(const DealtMatrix& matrix, const FlatParameter& parameter,
                                        const WholeMatrix& whole) const {
  orthogonalize(whole.gradient.data(), matrix.shape, muon_.ns_steps, whole.work, muon_.ns_dtype, device_.device);
  const Unrecorded unrecorded;
  flat_view(whole.gradient.data(), DType::kF32, matrix.extent.numel, device_.device).mul_(factor_of(muon_, parameter));
}

/// Applies scaled_gradient to each element.
void MatrixUpdate::scale(std::span<float> gradient, const UpdateRates& rates) const {
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

void MatrixUpdate::apply_rule(const DealtMatrix& matrix, const WholeMatrix& whole, const OfStep& step) const {
  const FlatGroup& group = *units_[matrix.unit]->groups[matrix.group];
  const FlatParameter& parameter = group.parameters[matrix.tensor];
  scale(whole.gradient, step.rates);
  const double lr = step.learning_rates.of(step.rates.lr, parameter.group);
  WholeTensor tensor{parameter, whole.masters, whole.gradient, {}, {}, lr, 0, step.steps[parameter_of(matrix)]};
  tensor.weight_decay = weight_decays_[parameter.group + 1];
  if (!group.tensor_states.empty()) {
    const std::size_t begin = group.tensor_states.first[matrix.tensor];
    const std::size_t count = group.tensor_states.first[matrix.tensor + 1] - begin;
    tensor.state_shapes = std::span(group.of_tensors.shapes).subspan(begin, count);
    for (std::size_t i = 0; i < count; ++i) {
      const Extent place = group.tensor_states.layout.extent(begin + i);
      tensor.states[i] = whole.states.subspan(static_cast<std::size_t>(place.offset - matrix.states.offset),
                                              static_cast<std::size_t>(place.numel));
    }
  }
  rule_->update(tensor);
}

}  // namespace tessera
