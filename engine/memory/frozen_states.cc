#include "engine/memory/frozen_states.h"

#include <algorithm>

#include "engine/memory/state_views.h"
#include "runtime/base/state_dtype.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

/// Whole blocks of 8-bit states, which have one scale.
Extent extent_of(std::int64_t numel, int rank, int ranks) {
  const std::int64_t blocks = (numel + kStateBlock - 1) / kStateBlock;
  const auto border = [&](std::int64_t i) { return std::min<std::int64_t>(numel, blocks * i / ranks * kStateBlock); };
  return {border(rank), border(rank + 1) - border(rank)};
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
  }
  return static_cast<std::int64_t>(bytes);
}

FrozenStates::Share FrozenStates::share_of(StateDType dtype, const JoinedState& joined, std::int64_t begin,
                                           std::int64_t numel, const Collectives& control) {
  const Extent own = extent_of(numel, control.rank(), control.size());
  const StateBytes from = state_bytes(dtype, begin + own.offset), size = state_bytes(dtype, own.numel);
  return {dtype, numel, {part_of(joined.data, from.data, size.data), part_of(joined.scales, from.scales, size.scales)}};
}

void FrozenStates::keep(const c10::TensorImpl* parameter, StateDType dtype, const JoinedState& joined,
                        std::int64_t begin, std::int64_t numel, const Collectives& control) {
  kept_[parameter].states.push_back(share_of(dtype, joined, begin, numel, control));
}

void FrozenStates::keep_tensor_state(const c10::TensorImpl* parameter, std::span<const float> values,
                                     const Collectives& control) {
  const auto bytes = std::as_bytes(values);
  const JoinedState joined{{bytes.begin(), bytes.end()}, {}};
  kept_[parameter].tensor_states.push_back(
      share_of(StateDType::kF32, joined, 0, static_cast<std::int64_t>(values.size()), control));
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
