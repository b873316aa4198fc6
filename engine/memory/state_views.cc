#include "engine/memory/state_views.h"

#include <algorithm>

#include "engine/memory/state_records.h"

namespace tessera {
namespace {

FlatGroup::State advanced(FlatGroup::State state, StateDType dtype, std::int64_t numel) {
  const StateBytes bytes = state_bytes(dtype, numel);
  if (state.data) state.data += bytes.data;
  if (state.scales) state.scales += bytes.scales / 4;
  return state;
}

/// `run` as the group's own pointers have it.
StateView view_of_memory(const FlatGroup& group, Extent run) {
  const std::int64_t in_part = run.offset - group.optimizer_part.offset;
  StateView view{run, nullptr, nullptr, {}};
  if (group.master) view.master = group.master + in_part;
  if (group.master_low) view.low = group.master_low + in_part;
  for (std::size_t i = 0; i < view.state.size(); ++i) {
    view.state[i] = advanced(group.state[i], group.records.state().state_dtype, in_part);
  }
  return view;
}

/// Replaces what lies in the chunk's record, which begins at `bytes`, by pointers there.
void point_into_record(StateView& view, const FlatGroup& group, std::int64_t chunk, std::byte* bytes) {
  const RecordLayout::Record record = group.records.record(chunk);
  const std::int64_t in_chunk = view.run.offset - group.optimizer_part.offset - group.records.chunk(chunk).offset;
  if (record.masters.bytes > 0) {
    std::byte* const masters = bytes + record.masters.offset + in_chunk * group.records.state().master_bytes;
    if (group.master_kind == MasterKind::kSplitBF16) {
      view.low = reinterpret_cast<std::int16_t*>(masters);
    } else {
      view.master = reinterpret_cast<float*>(masters);
    }
  }
  for (std::size_t i = 0; i < view.state.size(); ++i) {
    const RecordLayout::Record::State& piece = record.states[i];
    if (piece.numbers.bytes == 0) continue;
    FlatGroup::State state{bytes + piece.numbers.offset, nullptr};
    if (piece.scales.bytes > 0) state.scales = reinterpret_cast<float*>(bytes + piece.scales.offset);
    view.state[i] = advanced(state, group.records.state().state_dtype, in_chunk);
  }
}

/// A run in two: what the group's pointers reach, and chunks that have records.
struct SplitRun {
  Extent in_memory;
  std::int64_t first_chunk = 0, end_chunk = 0;  ///< of the part; none if they are equal
};

SplitRun split(const FlatGroup& group, Extent run) {
  const RecordLayout& records = group.records;
  const std::int64_t begin = group.optimizer_part.offset;
  const std::int64_t in_memory = group.below ? records.chunk(records.first_record()).offset : records.numel();
  SplitRun parts{intersect(run, {begin, in_memory})};
  const Extent below = intersect(run, {begin + in_memory, records.numel() - in_memory});
  if (below.numel == 0) return parts;
  parts.first_chunk = records.chunk_of(below.offset - begin);
  parts.end_chunk = records.chunk_of(below.end() - 1 - begin) + 1;
  return parts;
}

std::int64_t number_of(const FlatGroup& group, std::int64_t chunk) {
  return group.first_record + chunk - group.records.first_record();
}

}  // namespace

void for_each_state(const FlatGroup& group, Extent run, StateUse use, c10::function_ref<void(const StateView&)> visit,
                    Direction direction) {
  const SplitRun parts = split(group, run);
  const auto visit_memory = [&] {
    if (parts.in_memory.numel > 0) visit(view_of_memory(group, parts.in_memory));
  };
  const auto visit_record = [&](std::int64_t chunk) {
    const Extent place = group.records.chunk(chunk);
    const Extent here = intersect(run, {group.optimizer_part.offset + place.offset, place.numel});
    group.below->visit(number_of(group, chunk), use == StateUse::kUpdate, [&](std::byte* bytes) {
      StateView view = view_of_memory(group, here);
      point_into_record(view, group, chunk, bytes);
      visit(view);
    });
  };
  if (direction == Direction::kForward) {
    visit_memory();
    for (std::int64_t chunk = parts.first_chunk; chunk < parts.end_chunk; ++chunk) visit_record(chunk);
  } else {
    for (std::int64_t chunk = parts.end_chunk; chunk-- > parts.first_chunk;) visit_record(chunk);
    visit_memory();
  }
}

void append_records(const FlatGroup& group, Extent run, Direction direction, std::vector<std::int64_t>& numbers) {
  const SplitRun parts = split(group, run);
  for (std::int64_t i = 0; i < parts.end_chunk - parts.first_chunk; ++i) {
    const std::int64_t chunk = direction == Direction::kForward ? parts.first_chunk + i : parts.end_chunk - 1 - i;
    const std::int64_t number = number_of(group, chunk);
    if (numbers.empty() || numbers.back() != number) numbers.push_back(number);
  }
}

OptimizerSlice optimizer_slice(const FlatGroup& group, const StateView& view) {
  const TieredState& kept = group.records.state();
  const std::int64_t in_part = view.run.offset - group.optimizer_part.offset;
  const auto numel = static_cast<std::size_t>(view.run.numel);
  const StateBytes size = state_bytes(kept.state_dtype, view.run.numel);
  const auto slice_of = [&](const FlatGroup::State& state) {
    StateSlice slice{{state.data, static_cast<std::size_t>(size.data)}, {}};
    if (state.scales) slice.scales = {state.scales, static_cast<std::size_t>(size.scales / 4)};
    return slice;
  };
  OptimizerSlice slice;
  slice.gradient = {group.gradient + (view.run.offset - group.gradient_part.offset), numel};
  slice.master_kind = group.master_kind;
  if (view.master) slice.master = {view.master, numel};
  if (view.low) slice.low = {view.low, numel};
  if (group.dtype != DType::kF32) {
    slice.parameter = group.updated() + in_part * group.element_bytes();
    slice.parameter_dtype = group.dtype;
  }
  if (kept.states > 0) slice.state0 = slice_of(view.state[0]);
  if (kept.states > 1) slice.state1 = slice_of(view.state[1]);
  slice.first_element = static_cast<std::uint64_t>(view.run.offset);
  slice.stream = static_cast<std::uint64_t>(group.unit->index) << 32 | group.index;
  return slice;
}

StateView states_in_memory(const FlatGroup& group) { return view_of_memory(group, group.optimizer_part); }

}  // namespace tessera
