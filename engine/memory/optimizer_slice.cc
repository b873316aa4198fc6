#include "engine/memory/optimizer_slice.h"

namespace tessera {
namespace {

StateSlice state_of(const FlatGroup::State& state, StateDType dtype, std::int64_t begin, std::int64_t numel) {
  const StateBytes before = state_bytes(dtype, begin), size = state_bytes(dtype, numel);
  StateSlice slice;
  slice.data = {state.data + before.data, static_cast<std::size_t>(size.data)};
  if (state.scales) slice.scales = {state.scales + before.scales / 4, static_cast<std::size_t>(size.scales / 4)};
  return slice;
}

}  // namespace

OptimizerSlice optimizer_slice(const FlatGroup& group, Extent run, int num_states, StateDType state_dtype) {
  const std::int64_t in_part = run.offset - group.optimizer_part.offset;
  const auto numel = static_cast<std::size_t>(run.numel);
  OptimizerSlice slice;
  slice.gradient = {group.gradient + (run.offset - group.gradient_part.offset), numel};
  slice.master_kind = group.master_kind;
  if (group.master) slice.master = {group.master + in_part, numel};
  if (group.master_low) slice.low = {group.master_low + in_part, numel};
  if (group.dtype != DType::kF32) {
    slice.parameter = group.updated() + in_part * group.element_bytes();
    slice.parameter_dtype = group.dtype;
  }
  if (num_states > 0) slice.state0 = state_of(group.state[0], state_dtype, in_part, run.numel);
  if (num_states > 1) slice.state1 = state_of(group.state[1], state_dtype, in_part, run.numel);
  slice.first_element = static_cast<std::uint64_t>(run.offset);
  slice.stream = static_cast<std::uint64_t>(group.unit->index) << 32 | group.index;
  return slice;
}

}  // namespace tessera
