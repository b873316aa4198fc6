#include "engine/memory/carried_states.h"

#include <algorithm>
#include <unordered_map>

#include "engine/memory/host_view.h"
#include "engine/memory/state_views.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

struct ParameterPlace {
  FlatGroup* group = nullptr;
  std::size_t parameter = 0;
};

std::unordered_map<const c10::TensorImpl*, ParameterPlace> places_in(const std::vector<std::unique_ptr<Unit>>& units) {
  std::unordered_map<const c10::TensorImpl*, ParameterPlace> places;
  for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
    if (group.trainable) places[group.parameters[i].tensor.unsafeGetTensorImpl()] = {&group, i};
  });
  return places;
}

}  // namespace

CarriedStates::CarriedStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                             const MeshPosition& mesh, const TrainingMemory& memory, const MeshAxes& axes)
    : transport_(axes.reduce), memory_(memory.optimizer), placement_(plan.input().placement.optimizer), mesh_(mesh) {
  for_each_trainable(units, [&](const FlatGroup& group) {
    FlatGroup& carried = groups_.emplace_back(group.without_module());
    carried.parameters = group.parameters;  // which shows where each goes
  });
}

void CarriedStates::write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control) const {
  write_tensor_states(units, control);
  const auto places = places_in(units);
  for (const FlatGroup& group : groups_) {
    for (std::size_t state = 0; state < group.records.state().states.size(); ++state) {
      const Joined joined = join(group, state, control);
      for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        const auto place = places.find(group.parameters[i].tensor.unsafeGetTensorImpl());
        if (place == places.end()) continue;  // it trains no longer
        hand_out(joined, group.layout.extent(i).offset, *place->second.group, place->second.parameter, state);
      }
    }
  }
}

void CarriedStates::write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control) const {
  const auto places = places_in(units);
  for (const FlatGroup& group : groups_) {
    const std::int64_t numel = group.tensor_states.numel();
    if (numel == 0) continue;
    std::vector<float> joined(static_cast<std::size_t>(numel));
    const Extent held = group.tensor_state_part;
    visit_tensor_states(group, StateUse::kRead, [&](const TensorStatesView& view) {
      fetch_state(joined.data() + held.offset, view.states, held.numel * 4, view.place);
    });
    for_each_part(placement_, mesh_, numel, [&](int rank, Extent part) {
      const auto bytes = static_cast<std::size_t>(part.numel) * sizeof(float);
      throw_if_error(control.broadcast("optimizer state", joined.data() + part.offset, bytes, rank).wait());
    });
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const auto place = places.find(group.parameters[i].tensor.unsafeGetTensorImpl());
      if (place == places.end()) continue;
      const FlatGroup& target = *place->second.group;
      std::size_t state = group.tensor_states.first[i];
      for_each_tensor_state(target, place->second.parameter, [&](const TensorState&, Extent whole) {
        const Extent own = intersect(whole, target.tensor_state_part);
        const std::int64_t begin = group.tensor_states.layout.extent(state++).offset + (own.offset - whole.offset);
        visit_tensor_states(target, StateUse::kUpdate, [&](const TensorStatesView& view) {
          write_state(view.at(own.offset), joined.data() + begin, own.numel * 4, view.place);
        });
      });
    }
  }
}

CarriedStates::Joined CarriedStates::join(const FlatGroup& group, std::size_t state, Collectives& control) const {
  const StateDType dtype = group.records.state().states[state];
  const std::int64_t numel = group.layout.numel();
  const StateBytes whole = state_bytes(dtype, numel);
  Joined joined{std::vector<std::byte>(static_cast<std::size_t>(whole.data)),
                std::vector<std::byte>(static_cast<std::size_t>(whole.scales))};
  for_each_state(
      group, StateKind::kMastersAndStates, group.optimizer_part, StateUse::kRead, [&](const StateView& view) {
        const StateBytes begin = state_bytes(dtype, view.run.offset), size = state_bytes(dtype, view.run.numel);
        fetch_state(joined.data.data() + begin.data, view.state[state].data, size.data, view.states_place);
        fetch_state(joined.scales.data() + begin.scales, view.state[state].scales, size.scales, view.states_place);
      });
  const auto send = [&](std::byte* bytes, std::int64_t size, int rank) {
    if (size == 0) return;
    throw_if_error(control.broadcast("optimizer state", bytes, static_cast<std::size_t>(size), rank).wait());
  };
  for_each_part(placement_, mesh_, numel, [&](int rank, Extent part) {
    const StateBytes at = state_bytes(dtype, part.offset), size = state_bytes(dtype, part.numel);
    send(joined.data.data() + at.data, size.data, rank);
    send(joined.scales.data() + at.scales, size.scales, rank);
  });
  return joined;
}

void CarriedStates::hand_out(const Joined& joined, std::int64_t begin, FlatGroup& target, std::size_t i,
                             std::size_t state) const {
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

}  // namespace tessera
