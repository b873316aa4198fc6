#include "engine/checkpoint/stored_states.h"

#include <algorithm>

#include "engine/step/own_optimizer.h"
#include "optim/muon_optimizer.h"
#include "tessera/strategy.h"

namespace tessera {

StoredStates::StoredStates(const Strategy& strategy, const std::shared_ptr<const ElementwiseOptimizer>& own_rule) {
  of_elements_ = add(*make_optimizer(strategy.optimizer, strategy.ema, own_rule));
  if (strategy.optimizer.type == OptimizerType::kMuon)
    of_matrices_ = add(MuonOptimizer(strategy.optimizer, strategy.ema));
}

std::vector<std::size_t> StoredStates::add(const Optimizer& optimizer) {
  std::vector<std::size_t> places;
  for (const StateInfo& state : optimizer.states()) {
    const auto known = std::ranges::find(all_, state.name, &SavedState::name);
    places.push_back(static_cast<std::size_t>(known - all_.begin()));
    if (known == all_.end()) all_.push_back({state.name, name_of(state.dtype)});
  }
  return places;
}

std::optional<std::vector<std::string>> StoredStates::names_of(const FlatGroup& group) const {
  const std::span<const std::size_t> places = of(group);
  if (places.size() == all_.size()) return std::nullopt;
  std::vector<std::string> names;
  for (const std::size_t place : places) names.push_back(all_[place].name);
  return names;
}

StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel) {
  return state_bytes(group.records.state().states[index], numel);
}

}  // namespace tessera
