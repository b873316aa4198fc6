#include "engine/step/rules/matrix_update.h"

#include <algorithm>
#include <utility>

#include "engine/memory/state_views.h"

namespace tessera {
namespace {

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
      rule_(context.strategy, std::move(rule), device),
      states_(context.memory.tensor_state_carrier()) {
  std::size_t count = 0;
  for_each_trainable(units_, [&](const FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i, ++count) {
      if (!group.matrices.empty()) parameters_.push_back(count);
    }
  });
  exchange_.emplace(context, rule_.assigner(), device, kernels);
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
  const FlatGroup& group = *units_[matrix.unit]->groups[matrix.group];
  if (!step) return rule_.compute(group, matrix.tensor, whole, nullptr);
  const double lr = step->learning_rates.of(step->rates.lr, group.parameters[matrix.tensor].group);
  const MatrixRule::Numbers numbers{step->rates, lr, step->steps[parameter_of(matrix)]};
  rule_.compute(group, matrix.tensor, whole, &numbers);
}

}  // namespace tessera
