#include "engine/memory/frozen_states.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/memory/master_weights.h"
#include "engine/memory/state_views.h"
#include "runtime/base/bytes.h"
#include "runtime/base/state_dtype.h"
#include "runtime/border/throw.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

std::vector<std::byte> part_of(const std::vector<std::byte>& bytes, std::int64_t begin, std::int64_t count) {
  return {bytes.begin() + begin, bytes.begin() + begin + count};
}

/// Returns this rank's share of a state whose values are `values`.
FrozenState shared_out(std::span<const float> values, const Collectives& control) {
  FrozenState state;
  state.numel = static_cast<std::int64_t>(values.size());
  const Extent own = FrozenStates::share_of(state.numel, control.rank(), control.size());
  const auto bytes =
      std::as_bytes(values.subspan(static_cast<std::size_t>(own.offset), static_cast<std::size_t>(own.numel)));
  state.own = std::make_shared<JoinedState>(JoinedState{{bytes.begin(), bytes.end()}, {}});
  return state;
}

/// Joins the whole state from all ranks' shares. It is collective.
JoinedState join(const FrozenState& state, Collectives& control) {
  const StateBytes whole = state_bytes(state.dtype, state.numel);
  JoinedState joined{std::vector<std::byte>(static_cast<std::size_t>(whole.data)),
                     std::vector<std::byte>(static_cast<std::size_t>(whole.scales))};
  for (int rank = 0; rank < control.size(); ++rank) {
    const Extent extent = FrozenStates::share_of(state.numel, rank, control.size());
    const StateBytes at = state_bytes(state.dtype, extent.offset), size = state_bytes(state.dtype, extent.numel);
    const auto send = [&](std::vector<std::byte>& to, const std::vector<std::byte>& own, std::int64_t begin,
                          std::int64_t count) {
      if (count == 0) return;
      if (rank == control.rank()) std::ranges::copy(own, to.begin() + begin);
      throw_if_error(
          control.broadcast("optimizer state", to.data() + begin, static_cast<std::size_t>(count), rank).wait());
    };
    send(joined.data, state.own->data, at.data, size.data);
    send(joined.scales, state.own->scales, at.scales, size.scales);
  }
  return joined;
}

/// Returns this rank's part of the parameters at `place`, widened to fp32, with zeros elsewhere.
at::Tensor widened_parameters(const FlatGroup& group, Extent place) {
  const at::Tensor values = at::zeros({place.numel});
  for_each_state(group, StateKind::kParameters, intersect(place, group.parameter_part), StateUse::kRead,
                 [&](const StateView& view) {
                   const HostView held(view.parameter, view.run.numel * group.element_bytes(), view.parameter_place,
                                       HostView::kFetch);
                   values.narrow(0, view.run.offset - place.offset, view.run.numel)
                       .copy_(flat_view(held.data(), group.dtype, view.run.numel, at::kCPU));
                 });
  return values;
}

/// Writes the masters of parameter `i`; `joined` has the masters of the whole parameter.
void write_master(const JoinedState& joined, FlatGroup& group, std::size_t i) {
  const Extent place = group.layout.extent(i);
  const at::Tensor master = at::empty({place.numel});
  std::memcpy(master.mutable_data_ptr<float>(), joined.data.data(), joined.data.size());
  write_values(group, masters_of_frozen(master, widened_parameters(group, place), group.dtype), place);
}

}  // namespace

Extent FrozenStates::share_of(std::int64_t numel, int rank, int ranks) {
  const std::int64_t blocks = (numel + kStateBlock - 1) / kStateBlock;
  const auto border = [&](std::int64_t i) { return std::min<std::int64_t>(numel, blocks * i / ranks * kStateBlock); };
  return {border(rank), border(rank + 1) - border(rank)};
}

std::int64_t FrozenStates::bytes() const {
  std::size_t bytes = 0;
  for (const auto& [parameter, kept] : kept_) {
    for (const FrozenState& state : kept.states) bytes += state.own->data.size() + state.own->scales.size();
    if (kept.master) bytes += kept.master->own->data.size();
  }
  return static_cast<std::int64_t>(bytes);
}

std::string FrozenStates::describe() const {
  return "the optimizer states of " + std::to_string(kept_.size()) +
         " frozen parameters stay in the host's memory until these train again: " + format_bytes(bytes()) +
         " on this rank, beside the plan";
}

const FrozenParameter* FrozenStates::find(const at::Tensor& parameter) const {
  const auto found = kept_.find(parameter.unsafeGetTensorImpl());
  return found == kept_.end() ? nullptr : &found->second;
}

void FrozenStates::put(const at::Tensor& parameter, FrozenParameter kept) {
  kept_[parameter.unsafeGetTensorImpl()] = std::move(kept);
}

void FrozenStates::keep_masters(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement placement,
                                const MeshPosition& mesh, Collectives& control) {
  const Unrecorded unrecorded;
  const auto is_leaving = [](const FlatParameter& parameter) { return !parameter.tensor.requires_grad(); };
  for_each_trainable(units, [&](const FlatGroup& group) {
    if (group.dtype == DType::kF32 || std::ranges::none_of(group.parameters, is_leaving)) return;
    const at::Tensor flat = at::zeros({group.layout.numel()});
    float* const values = flat.mutable_data_ptr<float>();
    read_values(group, flat);
    for_each_part(placement, mesh, group.layout.numel(), [&](int rank, Extent part) {
      const auto bytes = static_cast<std::size_t>(part.numel) * sizeof(float);
      throw_if_error(control.broadcast("masters", values + part.offset, bytes, rank).wait());
    });
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      if (!is_leaving(group.parameters[i])) continue;
      const Extent place = group.layout.extent(i);
      kept_[group.parameters[i].tensor.unsafeGetTensorImpl()].master =
          shared_out({values + place.offset, static_cast<std::size_t>(place.numel)}, control);
    }
  });
}

void FrozenStates::keep(const at::Tensor& parameter, const std::string& name, StateDType dtype,
                        const JoinedState& joined, Extent place, const Collectives& control) {
  const Extent own = share_of(place.numel, control.rank(), control.size());
  const StateBytes from = state_bytes(dtype, place.offset + own.offset), size = state_bytes(dtype, own.numel);
  auto share = std::make_shared<JoinedState>(
      JoinedState{part_of(joined.data, from.data, size.data), part_of(joined.scales, from.scales, size.scales)});
  kept_[parameter.unsafeGetTensorImpl()].states.push_back({name, dtype, place.numel, std::nullopt, std::move(share)});
}

void FrozenStates::keep_tensor_state(const at::Tensor& parameter, const TensorState& state,
                                     std::span<const float> values, const Collectives& control) {
  FrozenState share = shared_out(values, control);
  share.name = state.name;
  share.sizes = state.sizes;
  kept_[parameter.unsafeGetTensorImpl()].states.push_back(std::move(share));
}

void FrozenStates::give_back(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                             std::map<const c10::TensorImpl*, std::int64_t>& updates) {
  if (kept_.empty()) return;
  const Unrecorded unrecorded;
  for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
    const auto found = kept_.find(group.parameters[i].tensor.unsafeGetTensorImpl());
    if (!group.trainable || found == kept_.end()) return;
    const FrozenParameter& kept = found->second;
    bool has_all = true;
    const auto find_state = [&](const std::string& name, StateDType dtype, const auto& sizes) -> const FrozenState* {
      const auto state = std::ranges::find(kept.states, name, &FrozenState::name);
      const bool fits = state != kept.states.end() && state->dtype == dtype && state->sizes == sizes;
      has_all = has_all && fits;
      return fits ? &*state : nullptr;
    };
    const StateFormats& formats = group.records.state().states;
    for (std::size_t state = 0; state < formats.size(); ++state) {
      const FrozenState* const from = find_state(name_of(group, state), formats[state], std::nullopt);
      if (from) hand_out(join(*from, control), 0, group, i, state);
    }
    std::size_t number = 0;
    for_each_tensor_state(group, i, [&](const TensorState& state, Extent) {
      const FrozenState* const from = find_state(state.name, StateDType::kF32, state.sizes);
      const std::size_t at = number++;
      if (!from) return;
      const JoinedState joined = join(*from, control);
      hand_out_tensor_state(reinterpret_cast<const float*>(joined.data.data()), group, i, at);
    });
    if (kept.master) write_master(join(*kept.master, control), group, i);
    updates[found->first] = has_all ? kept.updates : 0;
    kept_.erase(found);
  });
}

void FrozenStates::note_updates(const std::map<const c10::TensorImpl*, std::int64_t>& updates) {
  for (auto& [parameter, kept] : kept_) {
    const auto found = updates.find(parameter);
    if (found != updates.end()) kept.updates = found->second;
  }
}

}  // namespace tessera
