#include "engine/checkpoint/state_reader.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/checkpoint/saved_frozen.h"
#include "engine/checkpoint/state_formats.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/memory/master_weights.h"
#include "engine/memory/state_views.h"
#include "runtime/base/status.h"
#include "sharding/host_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

/// The number of elements that are converted to another format at once.
constexpr std::int64_t kConverted = std::int64_t{1} << 16;
/// The number of elements that are read at once into their place in memory. If the place is on a GPU, they are read
/// into host memory and copied.
constexpr std::int64_t kInPlace = std::int64_t{1} << 22;

/// Calls `visit(portion)` for the portions of `run`. Each portion but the last has `most` elements.
template <class Visit>
absl::Status for_each_portion(Extent run, std::int64_t most, const Visit& visit) {
  static_assert(kConverted % kStateBlock == 0 && kInPlace % kStateBlock == 0);
  for (std::int64_t begin = run.offset; begin < run.end(); begin += most)
    TESSERA_RETURN_IF_ERROR(visit(Extent{begin, std::min(most, run.end() - begin)}));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FrozenStates> StateReader::read() {
  const Unrecorded unrecorded;
  FrozenStates frozen;
  for (const MatchedParameter& parameter : matched_.parameters) {
    TESSERA_RETURN_IF_ERROR(read_value(parameter));
    const FlatGroup& group = *parameter.group;
    if (group.trainable) {
      TESSERA_RETURN_IF_ERROR(read_states(parameter));
      continue;
    }
    TESSERA_ASSIGN_OR_RETURN(FrozenParameter kept,
                             read_frozen(checkpoint_, *parameter.saved, group, states_, rank_, ranks_));
    if (!kept.states.empty() || kept.master) frozen.put(group.parameters[parameter.index].tensor, std::move(kept));
  }
  return frozen;
}

/// Reads the states of a parameter that trains, or clears them where the checkpoint has none.
absl::Status StateReader::read_states(const MatchedParameter& parameter) {
  if (!parameter.saved->keeps_states()) {
    clear_states(parameter);
    return absl::OkStatus();
  }
  for (std::size_t state = 0; state < states_.of(*parameter.group).size(); ++state)
    TESSERA_RETURN_IF_ERROR(read_state(parameter, state));
  return read_tensor_states(parameter);
}

/// Reads a parameter's masters, and rounds the parameter from them; a frozen parameter's values are read as they are.
/// This rank's part of the masters is within this rank's part of the parameter.
absl::Status StateReader::read_value(const MatchedParameter& parameter) {
  FlatGroup& group = *parameter.group;
  const SavedParameter& saved = *parameter.saved;
  if (saved.trains && group.trainable && group.dtype == DType::kF32) return read_f32_value(parameter);
  const std::string word = saved.trains ? "F32" : saved.dtype;
  const bool wants_master = saved.keeps_master && (group.trainable || group.dtype == DType::kF32);
  const Extent place = group.layout.extent(parameter.index);
  const auto view = [&](const char* what, const std::string& type, Extent portion) -> absl::StatusOr<at::Tensor> {
    TESSERA_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes,
                             checkpoint_.view(what, saved.name, portion.offset - place.offset,
                                              static_cast<std::size_t>(portion.numel * element_bytes(type))));
    return at::from_blob(const_cast<std::byte*>(bytes.data()), {portion.numel}, at::TensorOptions(*type_of_word(type)));
  };
  return for_each_portion(intersect(place, group.parameter_part), kConverted, [&](Extent portion) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor values, view(saved.trains ? kMaster : kValue, word, portion));
    if (wants_master) {
      const at::Tensor held = values.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, view(kMaster, "F32", portion));
      values = masters_of_frozen(master, held, saved.dtype == "F16" ? DType::kF16 : DType::kBF16);
    }
    write_values(group, values.to(flat_type_of(group)), portion);
    return absl::OkStatus();
  });
}

absl::Status StateReader::read_f32_value(const MatchedParameter& parameter) {
  FlatGroup& group = *parameter.group;
  const Extent place = group.layout.extent(parameter.index);
  return for_each_portion(intersect(place, group.parameter_part), kInPlace, [&](Extent portion) {
    absl::Status status;
    for_each_state(group, StateKind::kParameters, portion, StateUse::kUpdate, [&](const StateView& view) {
      const HostView values(view.parameter, view.run.numel * 4, view.parameter_place, HostView::kUndefined);
      status.Update(checkpoint_.read(kMaster, parameter.saved->name, view.run.offset - place.offset,
                                     {values.data(), static_cast<std::size_t>(view.run.numel * 4)}));
      values.write_back();
    });
    return status;
  });
}

absl::Status StateReader::read_state(const MatchedParameter& parameter, std::size_t state) {
  FlatGroup& group = *parameter.group;
  const std::size_t place_of_state = states_.of(group)[state];
  const SavedState& saved = *matched_.states[place_of_state];
  const std::string& format = states_.all()[place_of_state].format;
  const std::int64_t size = element_bytes(dtype_of_state(saved));
  const Extent place = group.layout.extent(parameter.index), run = intersect(place, group.optimizer_part);
  const bool in_place = saved.format == format;
  TESSERA_RETURN_IF_ERROR(for_each_portion(run, in_place ? kInPlace : kConverted, [&](Extent portion) {
    absl::Status status;
    for_each_state(group, StateKind::kMastersAndStates, portion, StateUse::kUpdate, [&](const StateView& view) {
      const auto here = static_cast<std::size_t>(bytes_of_state(group, state, view.run.numel).data);
      const HostView numbers(view.state[state].data, static_cast<std::int64_t>(here), view.states_place,
                             HostView::kUndefined);
      const std::span<std::byte> to(numbers.data(), here);
      const std::int64_t first = view.run.offset - place.offset;
      if (in_place) {
        status.Update(checkpoint_.read(saved.name, parameter.saved->name, first, to));
      } else {
        const auto bytes =
            checkpoint_.view(saved.name, parameter.saved->name, first, static_cast<std::size_t>(view.run.numel * size));
        status.Update(bytes.status());
        if (bytes.ok()) convert_state(saved.format, *bytes, format, to);
      }
      numbers.write_back();
    });
    return status;
  }));
  return format == "8bit" ? read_scales(parameter, state, run) : absl::OkStatus();
}

absl::Status StateReader::read_tensor_states(const MatchedParameter& parameter) {
  const FlatGroup& group = *parameter.group;
  absl::Status status;
  const auto read = [&](const TensorStatesView& view, const TensorState& state, Extent place) {
    const SavedState& saved = *matched_.states[states_.place_of(state)];
    const std::int64_t size = element_bytes(dtype_of_state(saved));
    return for_each_portion(intersect(place, view.part), kConverted, [&](Extent portion) {
      TESSERA_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes,
                               checkpoint_.view(saved.name, parameter.saved->name, portion.offset - place.offset,
                                                static_cast<std::size_t>(portion.numel * size)));
      const HostView to(view.at(portion.offset), portion.numel * 4, view.place, HostView::kUndefined);
      convert_state(saved.format, bytes, "fp32", {to.data(), static_cast<std::size_t>(portion.numel * 4)});
      to.write_back();
      return absl::OkStatus();
    });
  };
  for_each_tensor_state(group, parameter.index, [&](const TensorState& state, Extent place) {
    visit_tensor_states(group, StateUse::kUpdate,
                        [&](const TensorStatesView& view) { status.Update(read(view, state, place)); });
  });
  return status;
}

absl::Status StateReader::read_scales(const MatchedParameter& parameter, std::size_t state, Extent run) {
  FlatGroup& group = *parameter.group;
  const Extent place = group.layout.extent(parameter.index);
  return for_each_portion(run, kConverted, [&](Extent portion) {
    const std::int64_t blocks = (portion.numel + kStateBlock - 1) / kStateBlock;
    TESSERA_ASSIGN_OR_RETURN(
        const std::span<const std::byte> scales,
        checkpoint_.view(states_.all()[states_.of(group)[state]].name + kScales, parameter.saved->name,
                         (portion.offset - place.offset) / kStateBlock, static_cast<std::size_t>(blocks) * 4));
    for_each_state(group, StateKind::kMastersAndStates, portion, StateUse::kUpdate, [&](const StateView& view) {
      const std::int64_t first = (view.run.offset - portion.offset) / kStateBlock;
      write_state(view.state[state].scales, scales.data() + first * 4,
                  bytes_of_state(group, state, view.run.numel).scales, view.states_place);
    });
    return absl::OkStatus();
  });
}

/// Sets the states to zeros, as in a new Engine.
void StateReader::clear_states(const MatchedParameter& parameter) const {
  FlatGroup& group = *parameter.group;
  const Extent run = intersect(group.layout.extent(parameter.index), group.optimizer_part);
  const std::size_t count = states_.of(group).size();
  const auto clear = [&](void* memory, std::int64_t bytes, MemoryPlace place) {
    if (bytes == 0) return;
    const HostView view(memory, bytes, place, HostView::kUndefined);
    std::memset(view.data(), 0, static_cast<std::size_t>(bytes));
    view.write_back();
  };
  for_each_tensor_state(group, parameter.index, [&](const TensorState&, Extent place) {
    visit_tensor_states(group, StateUse::kUpdate, [&](const TensorStatesView& view) {
      const Extent own = intersect(place, view.part);
      clear(view.at(own.offset), own.numel * 4, view.place);
    });
  });
  if (run.numel == 0 || count == 0) return;
  for_each_state(group, StateKind::kMastersAndStates, run, StateUse::kUpdate, [&](const StateView& view) {
    for (std::size_t state = 0; state < count; ++state) {
      const StateBytes bytes = bytes_of_state(group, state, view.run.numel);
      clear(view.state[state].data, bytes.data, view.states_place);
      clear(view.state[state].scales, bytes.scales, view.states_place);
    }
  });
}

}  // namespace tessera
