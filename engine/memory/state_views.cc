#include "engine/memory/state_views.h"

#include "engine/memory/records/tier_carrier.h"

namespace tessera {

// This file finds the memory in which the elements of a group lie, and visits it.
//
// A StateView has the pointers to parameters, masters and states of neighbouring elements. Some of these may lie in
// records. `place_of` says in which record an element lies, or that it lies in memory. `for_each_piece` cuts a run of
// elements into pieces, so that all elements of a piece lie in the same place. `for_each_state` makes a view of each
// piece (`view_of_memory`), lets carriers bring the records, and sets the view's pointers into the records
// (`point_into_record`) before it visits the view.

namespace {

FlatGroup::State advanced(FlatGroup::State state, StateDType dtype, std::int64_t numel) {
  const StateBytes bytes = state_bytes(dtype, numel);
  if (state.data) state.data += bytes.data;
  if (state.scales) state.scales += bytes.scales / 4;
  return state;
}

/// Sets the view's pointer to the parameters. Trainable fp32 parameters are also the masters.
void point_at_parameter(StateView& view, const FlatGroup& group, std::byte* parameter, MemoryPlace place) {
  view.parameter = parameter;
  view.parameter_place = place;
  if (!group.trainable || group.dtype != DType::kF32) return;
  view.master = reinterpret_cast<float*>(parameter);
  view.masters_place = place;
}

/// Returns the view of `run` with the group's own pointers, without records.
StateView view_of_memory(const FlatGroup& group, Extent run) {
  const std::int64_t in_part = run.offset - group.optimizer_part.offset;
  StateView view;
  view.run = run;
  view.parameter_place = view.masters_place = view.states_place = group.device;
  if (group.state[0].is_on_host) view.states_place = c10::Device(c10::kCPU);
  if (group.master) view.master = group.master + in_part;
  if (group.master_low) view.low = group.master_low + in_part;
  if (group.shard) {
    const std::int64_t in_shard = run.offset - group.parameter_part.offset;
    point_at_parameter(view, group, group.shard + in_shard * group.element_bytes(), group.device);
  }
  const StateFormats& formats = group.records.state().states;
  for (std::size_t i = 0; i < formats.size(); ++i) view.state[i] = advanced(group.state[i], formats[i], in_part);
  return view;
}

/// Sets the view's pointers into the chunk's record, which begins at `bytes`.
void point_into_record(StateView& view, const FlatGroup& group, std::int64_t chunk, std::byte* bytes,
                       MemoryPlace place) {
  const RecordLayout::Record record = group.records.record(chunk);
  const std::int64_t in_chunk = view.run.offset - group.optimizer_part.offset - group.records.chunk(chunk).offset;
  if (record.masters.bytes > 0) {
    view.masters_place = place;
    std::byte* const masters = bytes + record.masters.offset + in_chunk * group.records.state().master_bytes;
    if (group.master_kind == MasterKind::kSplitBF16) {
      view.low = reinterpret_cast<std::int16_t*>(masters);
    } else {
      view.master = reinterpret_cast<float*>(masters);
    }
  }
  const StateFormats& formats = group.records.state().states;
  for (std::size_t i = 0; i < formats.size(); ++i) {
    const RecordLayout::Record::State& piece = record.states[i];
    if (piece.numbers.bytes == 0) continue;
    view.states_place = place;
    FlatGroup::State state{bytes + piece.numbers.offset, nullptr};
    if (piece.scales.bytes > 0) state.scales = reinterpret_cast<float*>(bytes + piece.scales.offset);
    view.state[i] = advanced(state, formats[i], in_chunk);
  }
}

/// A part of a group's flat buffer. Some chunks of the part lie in records.
struct Tiered {
  Extent part;
  const Chunks& chunks;
  std::int64_t first_record = 0;
  TierCarrier* records = nullptr;
};

Tiered parameters_of(const FlatGroup& group) {
  return {group.parameter_part, group.parameters_below.chunks, group.parameters_below.first_record,
          group.parameters_below.carrier.get()};
}

Tiered states_of(const FlatGroup& group) {
  return {group.optimizer_part, group.records, group.states_below.first_record, group.states_below.carrier.get()};
}

constexpr std::int64_t kInMemory = -1;

/// The place of elements: memory, or a chunk's record.
struct Place {
  Extent run;                      ///< the neighbouring elements of the flat buffer that lie in this place
  std::int64_t chunk = kInMemory;  ///< number of the chunk in the part, if the place is a record; else kInMemory
};

Place place_of(const Tiered& tiered, std::int64_t element) {
  const std::int64_t begin = tiered.part.offset;
  const std::int64_t in_memory = tiered.chunks.before_records();
  if (element < begin + in_memory) return {{begin, in_memory}};
  const std::int64_t chunk = tiered.chunks.chunk_of(element - begin);
  const Extent place = tiered.chunks.chunk(chunk);
  return {{begin + place.offset, place.numel}, chunk};
}

std::int64_t record_of(const Tiered& tiered, std::int64_t chunk) {
  return tiered.first_record + chunk - tiered.chunks.first_record();
}

/// Cuts `run` into pieces, each of which lies in one place, and calls `visit(piece)` for each piece.
/// `place_at(element)` returns the extent of the elements that lie in the same place as this element.
template <class PlaceAt, class Visit>
void for_each_piece(Extent run, Direction direction, const PlaceAt& place_at, const Visit& visit) {
  Extent rest = run;
  while (rest.numel > 0) {
    const bool forward = direction == Direction::kForward;
    const Extent piece = intersect(rest, place_at(forward ? rest.offset : rest.end() - 1));
    visit(piece);
    rest = forward ? Extent{piece.end(), rest.end() - piece.end()} : Extent{rest.offset, piece.offset - rest.offset};
  }
}

}  // namespace

void for_each_state(const FlatGroup& group, StateKind kind, Extent run, StateUse use,
                    c10::function_ref<void(const StateView&)> visit, Direction direction) {
  const MemoryPlace in_record{group.device, true};
  const bool updates = use == StateUse::kUpdate, updates_states = use != StateUse::kRead;
  const Tiered parameters = parameters_of(group), states = states_of(group);
  const bool wants_parameters = kind != StateKind::kMastersAndStates, wants_states = kind != StateKind::kParameters;
  const auto visit_states = [&](StateView& view) {
    const std::int64_t chunk = wants_states ? place_of(states, view.run.offset).chunk : kInMemory;
    if (chunk == kInMemory) return visit(view);
    states.records->visit(record_of(states, chunk), updates_states, [&](std::byte* bytes) {
      point_into_record(view, group, chunk, bytes, in_record);
      visit(view);
    });
  };
  const auto visit_piece = [&](Extent piece) {
    StateView view = view_of_memory(group, piece);
    const Place place = wants_parameters ? place_of(parameters, piece.offset) : Place{piece};
    if (place.chunk == kInMemory) return visit_states(view);
    parameters.records->visit(record_of(parameters, place.chunk), updates, [&](std::byte* bytes) {
      point_at_parameter(view, group, bytes + (piece.offset - place.run.offset) * group.element_bytes(), in_record);
      visit_states(view);
    });
  };
  const auto place_at = [&](std::int64_t element) {
    Extent place = run;
    if (wants_parameters) place = intersect(place, place_of(parameters, element).run);
    if (wants_states) place = intersect(place, place_of(states, element).run);
    return place;
  };
  for_each_piece(run, direction, place_at, visit_piece);
}

void visit_tensor_states(const FlatGroup& group, StateUse use, c10::function_ref<void(const TensorStatesView&)> visit) {
  const c10::Device place = group.state[0].is_on_host ? c10::Device(c10::kCPU) : group.device;
  if (!group.of_tensors.below) return visit({group.of_tensors.part, group.of_tensors.data, place});
  group.of_tensors.below->visit(group.of_tensors.record, use != StateUse::kRead, [&](std::byte* bytes) {
    visit({group.of_tensors.part, reinterpret_cast<float*>(bytes), MemoryPlace(group.device, /*in_record=*/true)});
  });
}

void append_records(const FlatGroup& group, StateKind kind, Extent run, Direction direction,
                    std::vector<std::int64_t>& numbers) {
  const Tiered tiered = kind == StateKind::kParameters ? parameters_of(group) : states_of(group);
  const auto place_at = [&](std::int64_t element) { return place_of(tiered, element).run; };
  for_each_piece(run, direction, place_at, [&](Extent piece) {
    const std::int64_t chunk = place_of(tiered, piece.offset).chunk;
    if (chunk == kInMemory) return;
    const std::int64_t number = record_of(tiered, chunk);
    if (numbers.empty() || numbers.back() != number) numbers.push_back(number);
  });
}

OptimizerSlice optimizer_slice(const FlatGroup& group, const StateView& view) {
  const StateFormats& formats = group.records.state().states;
  const auto numel = static_cast<std::size_t>(view.run.numel);
  OptimizerSlice slice;
  // If updates run in backward, a group has a gradient only while its unit is updated.
  const float* const gradient =
      group.gradient ? group.gradient + (view.run.offset - group.gradient_part.offset) : nullptr;
  slice.gradient = {gradient, numel};
  slice.master_kind = group.master_kind;
  if (view.master) slice.master = {view.master, numel};
  if (view.low) slice.low = {view.low, numel};
  if (group.dtype != DType::kF32) {
    slice.parameter = view.parameter;
    slice.parameter_dtype = group.dtype;
  }
  for (std::size_t i = 0; i < formats.size(); ++i) {
    const StateBytes size = state_bytes(formats[i], view.run.numel);
    slice.states[i].data = {view.state[i].data, static_cast<std::size_t>(size.data)};
    if (view.state[i].scales)
      slice.states[i].scales = {view.state[i].scales, static_cast<std::size_t>(size.scales / 4)};
  }
  slice.first_element = static_cast<std::uint64_t>(view.run.offset);
  slice.stream = static_cast<std::uint64_t>(group.unit->index) << 32 | group.index;
  return slice;
}

std::span<float> gradients_of(const FlatGroup& group, const OptimizerSlice& slice) {
  const std::int64_t begin = static_cast<std::int64_t>(slice.first_element) - group.gradient_part.offset;
  return {group.gradient + begin, slice.gradient.size()};
}

Extent run_in_memory(const FlatGroup& group) { return {group.optimizer_part.offset, group.records.before_records()}; }

StateView states_in_memory(const FlatGroup& group, Extent run) { return view_of_memory(group, run); }

Extent run_of_chunk(const FlatGroup& group, std::int64_t chunk) {
  const Extent place = group.records.chunk(chunk);
  return {group.optimizer_part.offset + place.offset, place.numel};
}

StateView states_in_record(const FlatGroup& group, std::int64_t chunk, Extent run, std::byte* bytes) {
  StateView view = view_of_memory(group, run);
  point_into_record(view, group, chunk, bytes, group.device);
  return view;
}

void for_each_parameter_piece(const FlatGroup& group, Extent run, Direction direction,
                              c10::function_ref<void(const ParameterPiece&)> visit) {
  const Tiered tiered = parameters_of(group);
  const auto place_at = [&](std::int64_t element) { return place_of(tiered, element).run; };
  for_each_piece(run, direction, place_at, [&](Extent piece) {
    const Place place = place_of(tiered, piece.offset);
    if (place.chunk == kInMemory) return visit({piece});
    visit({piece, record_of(tiered, place.chunk), (piece.offset - place.run.offset) * group.element_bytes()});
  });
}

void point_at_parameters(StateView& view, const FlatGroup& group, std::byte* parameters) {
  point_at_parameter(view, group, parameters, group.device);
}

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
