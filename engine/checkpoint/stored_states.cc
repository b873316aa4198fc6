#include "engine/checkpoint/stored_states.h"

#include "tessera/strategy.h"

namespace tessera {

std::vector<SavedState> stored_states(const MemoryPlan& plan, const Optimizer& optimizer) {
  std::vector<SavedState> states;
  for (int i = 0; i < plan.input().optimizer_states; ++i)
    states.push_back({optimizer.state_name(i), name_of(plan.input().state_dtype)});
  return states;
}

StateBytes bytes_of_state(const FlatGroup& group, std::size_t, std::int64_t numel) {
  return state_bytes(group.records.state().state_dtype, numel);
}

}  // namespace tessera
