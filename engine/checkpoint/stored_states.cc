#include "engine/checkpoint/stored_states.h"

#include "tessera/strategy.h"

namespace tessera {

std::vector<SavedState> stored_states(const Optimizer& optimizer) {
  std::vector<SavedState> states;
  for (const StateInfo& state : optimizer.states()) states.push_back({state.name, name_of(state.dtype)});
  return states;
}

StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel) {
  return state_bytes(group.records.state().states[index], numel);
}

}  // namespace tessera
