#include "engine/memory/carried_states.h"

#include <optional>
#include <unordered_map>

#include "engine/memory/state_views.h"
#include "runtime/border/throw.h"
#include "sharding/host_view.h"

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

/// Returns whether some step updated the parameter.
bool has_moved(const at::Tensor& parameter, const CarriedStates::Updates& updates) {
  const auto found = updates.find(parameter.unsafeGetTensorImpl());
  return found != updates.end() && found->second > 0;
}

/// Returns the number of the group's element-wise state with this name, or nothing.
std::optional<std::size_t> state_named(const FlatGroup& group, const std::string& name, NameOfState name_of) {
  for (std::size_t state = 0; state < group.records.state().states.size(); ++state) {
    if (name_of(group, state) == name) return state;
  }
  return std::nullopt;
}

/// Returns the number of states that a parameter has.
std::size_t count_of_states(const FlatGroup& group, std::size_t parameter) {
  std::size_t count = group.records.state().states.size();
  for_each_tensor_state(group, parameter, [&](const TensorState&, Extent) { ++count; });
  return count;
}

}  // namespace

CarriedStates::CarriedStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                             const MeshPosition& mesh, const TrainingMemory& memory, const MeshAxes& axes)
    : transport_(axes.reduce), memory_(memory.optimizer), placement_(plan.placement().optimizer), mesh_(mesh) {
  for_each_trainable(units, [&](const FlatGroup& group) {
    FlatGroup& carried = groups_.emplace_back(group.without_module());
    carried.parameters = group.parameters;  // the tensors of the parameters, which show to which parameter each state
                                            // belongs
  });
}

void CarriedStates::write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                             FrozenStates& frozen, Updates& updates) const {
  std::unordered_map<const c10::TensorImpl*, std::size_t> given;
  const auto count = [&](const c10::TensorImpl* parameter) { ++given[parameter]; };
  write_tensor_states(units, control, frozen, updates, count);
  const auto places = places_in(units);
  for (const FlatGroup& group : groups_) {
    const StateFormats& formats = group.records.state().states;
    for (std::size_t state = 0; state < formats.size(); ++state) {
      const std::string& name = name_of(group, state);
      const JoinedState joined = join(group, state, control);
      for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        const at::Tensor& parameter = group.parameters[i].tensor;
        const auto place = places.find(parameter.unsafeGetTensorImpl());
        const Extent from = group.layout.extent(i);
        if (place == places.end()) {  // the parameter no longer trains
          if (has_moved(parameter, updates)) frozen.keep(parameter, name, formats[state], joined, from, control);
          continue;
        }
        FlatGroup& to = *place->second.group;
        const std::optional<std::size_t> there = state_named(to, name, name_of);
        if (!there) continue;
        hand_out(joined, from.offset, to, place->second.parameter, *there);
        count(parameter.unsafeGetTensorImpl());
      }
    }
  }
  for (const auto& [parameter, place] : places) {
    if (given[parameter] < count_of_states(*place.group, place.parameter)) updates.erase(parameter);
  }
}

void CarriedStates::write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control,
                                        FrozenStates& frozen, const Updates& updates,
                                        c10::function_ref<void(const c10::TensorImpl*)> count) const {
  const auto places = places_in(units);
  for (const FlatGroup& group : groups_) {
    const std::int64_t numel = group.tensor_states.numel();
    if (numel == 0) continue;
    std::vector<float> joined(static_cast<std::size_t>(numel));
    const Extent held = group.of_tensors.part;
    visit_tensor_states(group, StateUse::kRead, [&](const TensorStatesView& view) {
      fetch_state(joined.data() + held.offset, view.states, held.numel * 4, view.place);
    });
    for_each_part(placement_, mesh_, numel, [&](int rank, Extent part) {
      const auto bytes = static_cast<std::size_t>(part.numel) * sizeof(float);
      throw_if_error(control.broadcast("optimizer state", joined.data() + part.offset, bytes, rank).wait());
    });
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor& parameter = group.parameters[i].tensor;
      const auto place = places.find(parameter.unsafeGetTensorImpl());
      for_each_tensor_state(group, i, [&](const TensorState& state, Extent whole) {
        const float* const values = joined.data() + whole.offset;
        if (place == places.end()) {
          if (has_moved(parameter, updates))
            frozen.keep_tensor_state(parameter, state, {values, static_cast<std::size_t>(whole.numel)}, control);
          return;
        }
        FlatGroup& to = *place->second.group;
        std::size_t number = 0;
        for_each_tensor_state(to, place->second.parameter, [&](const TensorState& wanted, Extent) {
          const std::size_t there = number++;
          if (wanted.name != state.name || wanted.sizes != state.sizes) return;
          hand_out_tensor_state(values, to, place->second.parameter, there);
          count(parameter.unsafeGetTensorImpl());
        });
      });
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
