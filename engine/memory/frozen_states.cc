#include "engine/memory/frozen_states.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

#include "engine/memory/master_weights.h"
#include "engine/memory/state_views.h"
#include "runtime/base/state_dtype.h"
#include "runtime/border/throw.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

/// Whole blocks of 8-bit states, which have one scale.
Extent extent_of(std::int64_t numel, int rank, int ranks) {
  const std::int64_t blocks = (numel + kStateBlock - 1) / kStateBlock;
  const auto border = [&](std::int64_t i) { return std::min<std::int64_t>(numel, blocks * i / ranks * kStateBlock); };
  return {border(rank), border(rank + 1) - border(rank)};
}

/// The masters of parameter `i`, whole, where it is what rounding makes of them. While it was frozen it was rounded to the nearest even.
void write_master(const JoinedState& joined, FlatGroup& group, std::size_t i, Collectives& control) {
  const Extent place = group.layout.extent(i), mine = intersect(place, group.optimizer_part);
  const at::Tensor master = at::empty({place.numel}), now = at::zeros({group.layout.numel()});
  std::memcpy(master.mutable_data_ptr<float>(), joined.data.data(), joined.data.size());
  read_values(group, now);
  char is_same = 1;
  if (mine.numel > 0) {
    const at::Tensor own = master.narrow(0, mine.offset - place.offset, mine.numel);
    const at::Tensor held = now.narrow(0, mine.offset, mine.numel);
    const at::Tensor to_even = own.to(scalar_type_of(group.dtype)).to(at::kFloat);
    is_same = held.eq(to_even).logical_or(held.eq(rounded_master(own, group))).all().item<bool>() ? 1 : 0;
  }
  std::vector<char> all(static_cast<std::size_t>(control.size()));
  throw_if_error(control.all_gather("masters", &is_same, all.data(), 1).wait());
  if (std::ranges::all_of(all, [](char same) { return same == 1; })) write_values(group, master, place);
}

std::vector<std::byte> part_of(const std::vector<std::byte>& bytes, std::int64_t begin, std::int64_t count) {
  return {bytes.begin() + begin, bytes.begin() + begin + count};
}

}  // namespace

std::int64_t FrozenStates::bytes() const {
  std::size_t bytes = 0;
  for (const auto& [parameter, kept] : kept_) {
    for (const Share& share : kept.states) bytes += share.own.data.size() + share.own.scales.size();
    for (const Share& share : kept.tensor_states) bytes += share.own.data.size();
    if (kept.master) bytes += kept.master->own.data.size();
  }
  return static_cast<std::int64_t>(bytes);
}

FrozenStates::Share FrozenStates::share_of(StateDType dtype, const JoinedState& joined, std::int64_t begin,
                                           std::int64_t numel, const Collectives& control) {
  const Extent own = extent_of(numel, control.rank(), control.size());
  const StateBytes from = state_bytes(dtype, begin + own.offset), size = state_bytes(dtype, own.numel);
  return {dtype, numel, {part_of(joined.data, from.data, size.data), part_of(joined.scales, from.scales, size.scales)}};
}

FrozenStates::Share FrozenStates::share_of(std::span<const float> values, const Collectives& control) {
  const auto numel = static_cast<std::int64_t>(values.size());
  const Extent own = extent_of(numel, control.rank(), control.size());
  const auto bytes =
      std::as_bytes(values.subspan(static_cast<std::size_t>(own.offset), static_cast<std::size_t>(own.numel)));
  return {StateDType::kF32, numel, {{bytes.begin(), bytes.end()}, {}}};
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
          share_of({values + place.offset, static_cast<std::size_t>(place.numel)}, control);
    }
  });
}

void FrozenStates::keep(const c10::TensorImpl* parameter, StateDType dtype, const JoinedState& joined,
                        std::int64_t begin, std::int64_t numel, const Collectives& control) {
  kept_[parameter].states.push_back(share_of(dtype, joined, begin, numel, control));
}

void FrozenStates::keep_tensor_state(const c10::TensorImpl* parameter, std::span<const float> values,
                                     const Collectives& control) {
  kept_[parameter].tensor_states.push_back(share_of(values, control));
}

JoinedState FrozenStates::join(const Share& share, Collectives& control) {
  const StateBytes whole = state_bytes(share.dtype, share.numel);
  JoinedState joined{std::vector<std::byte>(static_cast<std::size_t>(whole.data)),
                     std::vector<std::byte>(static_cast<std::size_t>(whole.scales))};
  for (int rank = 0; rank < control.size(); ++rank) {
    const Extent extent = extent_of(share.numel, rank, control.size());
    const StateBytes at = state_bytes(share.dtype, extent.offset), size = state_bytes(share.dtype, extent.numel);
    const auto send = [&](std::vector<std::byte>& to, const std::vector<std::byte>& own, std::int64_t begin,
                          std::int64_t count) {
      if (count == 0) return;
      if (rank == control.rank()) std::ranges::copy(own, to.begin() + begin);
      throw_if_error(
          control.broadcast("optimizer state", to.data() + begin, static_cast<std::size_t>(count), rank).wait());
    };
    send(joined.data, share.own.data, at.data, size.data);
    send(joined.scales, share.own.scales, at.scales, size.scales);
  }
  return joined;
}

void FrozenStates::give_back(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control,
                             std::map<const c10::TensorImpl*, std::int64_t>& updates) {
  if (kept_.empty()) return;
  const Unrecorded unrecorded;
  for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
    const auto found = kept_.find(group.parameters[i].tensor.unsafeGetTensorImpl());
    if (!group.trainable || found == kept_.end()) return;
    const Parameter& kept = found->second;
    for (std::size_t state = 0; state < kept.states.size(); ++state)
      hand_out(join(kept.states[state], control), 0, group, i, state);
    std::size_t state = 0;
    if (!kept.tensor_states.empty()) {
      for_each_tensor_state(group, i, [&](const TensorState&, Extent) {
        const JoinedState joined = join(kept.tensor_states[state], control);
        hand_out_tensor_state(reinterpret_cast<const float*>(joined.data.data()), group, i, state++);
      });
    }
    if (kept.master) write_master(join(*kept.master, control), group, i, control);
    updates[found->first] = kept.updates;
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
