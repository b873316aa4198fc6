#include "engine/memory/joined_state.h"

#include "engine/memory/state_views.h"

namespace tessera {

void hand_out(const JoinedState& joined, std::int64_t begin, FlatGroup& target, std::size_t i, std::size_t state) {
  const Extent place = target.layout.extent(i), mine = intersect(place, target.optimizer_part);
  if (mine.numel <= 0) return;
  const StateDType dtype = target.records.state().states[state];
  for_each_state(target, StateKind::kMastersAndStates, mine, StateUse::kUpdate, [&](const StateView& view) {
    const StateBytes from = state_bytes(dtype, begin + view.run.offset - place.offset);
    const StateBytes size = state_bytes(dtype, view.run.numel);
    write_state(view.state[state].data, joined.data.data() + from.data, size.data, view.states_place);
    write_state(view.state[state].scales, joined.scales.data() + from.scales, size.scales, view.states_place);
  });
}

void hand_out_tensor_state(const float* values, FlatGroup& target, std::size_t i, std::size_t state) {
  const Extent whole = target.tensor_states.layout.extent(target.tensor_states.first[i] + state);
  const Extent own = intersect(whole, target.of_tensors.part);
  if (own.numel <= 0) return;
  visit_tensor_states(target, StateUse::kUpdate, [&](const TensorStatesView& view) {
    write_state(view.at(own.offset), values + (own.offset - whole.offset), own.numel * 4, view.place);
  });
}

}  // namespace tessera
