#include "engine/checkpoint/stored_states.h"

#include <algorithm>

#include "engine/step/rules/own_optimizer.h"
#include "optim/master_assigner.h"
#include "optim/muon_optimizer.h"
#include "runtime/config/optimizer_rows.h"
#include "tessera/strategy.h"

namespace tessera {

StoredStates::StoredStates(const Strategy& strategy, const OwnRules& own_rules,
                           const std::vector<std::unique_ptr<Unit>>& units)
    : has_tensor_states_(has(strategy.optimizer.type, optimizer_traits::kTensorStates)) {
  of_elements_ = add(*make_optimizer(strategy.optimizer, strategy.ema, own_rules));
  of_matrices_ = strategy.optimizer.type == OptimizerType::kMuon
                     ? add(MuonOptimizer(strategy.optimizer, strategy.ema))
                     : add(MasterAssigner(strategy.optimizer, strategy.ema));
  for_each_trainable(units, [&](const FlatGroup& group) {
    for (const TensorState& state : group.of_tensors.shapes) add(state.name, StateDType::kF32);
  });
}

std::vector<std::size_t> StoredStates::add(const Optimizer& optimizer) {
  std::vector<std::size_t> places;
  for (const StateInfo& state : optimizer.states()) places.push_back(add(state.name, state.dtype));
  return places;
}

std::size_t StoredStates::add(const std::string& name, StateDType dtype) {
  const auto known = std::ranges::find(all_, name, &SavedState::name);
  const auto place = static_cast<std::size_t>(known - all_.begin());
  if (known == all_.end()) all_.push_back({name, name_of(dtype)});
  return place;
}

std::size_t StoredStates::place_of(const TensorState& state) const {
  return static_cast<std::size_t>(std::ranges::find(all_, state.name, &SavedState::name) - all_.begin());
}

std::optional<std::vector<std::string>> StoredStates::names_of(const FlatGroup& group, std::size_t parameter) const {
  std::vector<std::string> names;
  for (const std::size_t place : of(group)) names.push_back(all_[place].name);
  for_each_tensor_state(group, parameter, [&](const TensorState& state, Extent) { names.push_back(state.name); });
  if (names.size() == all_.size()) return std::nullopt;
  return names;
}

StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel) {
  return state_bytes(group.records.state().states[index], numel);
}

}  // namespace tessera
