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

void CarriedStates::write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control,
                             FrozenStates& frozen, const Updates& updates) const {
  const auto has_moved = [&](const c10::TensorImpl* parameter) {
    const auto found = updates.find(parameter);
    return found != updates.end() && found->second > 0;
  };
  write_tensor_states(units, control, frozen, has_moved);
  const auto places = places_in(units);
  for (const FlatGroup& group : groups_) {
    for (std::size_t state = 0; state < group.records.state().states.size(); ++state) {
      const JoinedState joined = join(group, state, control);
      for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        const c10::TensorImpl* const parameter = group.parameters[i].tensor.unsafeGetTensorImpl();
        const auto place = places.find(parameter);
        const Extent from = group.layout.extent(i);
        if (place != places.end()) {
          hand_out(joined, from.offset, *place->second.group, place->second.parameter, state);
        } else if (has_moved(parameter)) {  // it trains no longer
          frozen.keep(parameter, group.records.state().states[state], joined, from.offset, from.numel, control);
        }
      }
    }
  }
}

void CarriedStates::write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control,
                                        FrozenStates& frozen,
                                        c10::function_ref<bool(const c10::TensorImpl*)> has_moved) const {
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
      const c10::TensorImpl* const parameter = group.parameters[i].tensor.unsafeGetTensorImpl();
      const auto place = places.find(parameter);
      const std::size_t first = group.tensor_states.first[i], end = group.tensor_states.first[i + 1];
      for (std::size_t state = first; state < end; ++state) {
        const Extent whole = group.tensor_states.layout.extent(state);
        const float* const values = joined.data() + whole.offset;
        if (place != places.end()) {
          hand_out_tensor_state(values, *place->second.group, place->second.parameter, state - first);
        } else if (has_moved(parameter)) {
          frozen.keep_tensor_state(parameter, {values, static_cast<std::size_t>(whole.numel)}, control);
        }
      }
    }
  }
}

JoinedState CarriedStates::join(const FlatGroup& group, std::size_t state, Collectives& control) const {
  const StateDType dtype = group.records.state().states[state];
  const std::int64_t numel = group.layout.numel();
  const StateBytes whole = state_bytes(dtype, numel);
  JoinedState joined{std::vector<std::byte>(static_cast<std::size_t>(whole.data)),
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

}  // namespace tessera
