#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/optimizer.h"
#include "sharding/host_view.h"
#include "sharding/unit.h"

namespace tessera {

/// The training state of a run of elements. The state is in memory, and the pointers are valid, only during the call of
/// `visit` that gets the view (for_each_state).
struct StateView {
  Extent run;                      ///< range of elements in the group's flat buffer
  std::byte* parameter = nullptr;  ///< parameter of the first element, in the group's dtype
  float* master = nullptr;         ///< master of the first element; the same as `parameter` if the dtype is fp32
  std::int16_t* low = nullptr;     ///< low 16 bits of the first element's master, if masters are split
  /// The states of the first element; scales begin with the scale of the run's first block.
  std::array<FlatGroup::State, kMostStates> state;
  /// The kinds of memory to which the pointers point, for HostView. `masters_place` is for `master` and `low`.
  MemoryPlace parameter_place = c10::Device(c10::kCPU), masters_place = parameter_place, states_place = parameter_place;
};

/// The use of state by a visit. Records that are only read are not written back.
enum class StateUse : std::uint8_t {
  kRead,
  kUpdateStates,  ///< masters and states change; parameters are only read
  kUpdate,        ///< parameters, masters and states change
};
enum class Direction : std::uint8_t { kForward, kBackward };

/// The kind of state that a visit needs. A view has state of other kinds only if that state is in memory.
enum class StateKind : std::uint8_t {
  kParameters,        ///< runs lie in the group's parameter part
  kMastersAndStates,  ///< runs lie in the group's optimizer part
  kAll,               ///< runs lie in the group's optimizer part
};

/// Calls `visit(view)` for the state `kind` of `run`, piece by piece. All parameters of a piece lie in memory or in one
/// record, and so do its masters and states. Several threads may call it at once for runs that do not overlap. Throws
/// tessera::Error: 74 if a record cannot be read or written; 65 if a record that is read has other bytes than were
/// written.
void for_each_state(const FlatGroup& group, StateKind kind, Extent run, StateUse use,
                    c10::function_ref<void(const StateView&)> visit, Direction direction = Direction::kForward);

/// This rank's part of a group's tensor states. It is in memory only during the call of `visit` that gets it
/// (visit_tensor_states).
struct TensorStatesView {
  Extent part;  ///< TensorStateMemory::part
  float* states;
  MemoryPlace place;
  float* at(std::int64_t element) const { return states + (element - part.offset); }
};
/// Calls `visit` with this rank's part of the group's tensor states. `use`: kRead or kUpdate. Throws the errors of
/// for_each_state. REQUIRES: the group has tensor states.
void visit_tensor_states(const FlatGroup& group, StateUse use, c10::function_ref<void(const TensorStatesView&)> visit);

/// Appends to `numbers` the records that `for_each_state` would visit, in its order: records of parameters, or of
/// masters and states. A record that is visited several times in a row is appended once.
void append_records(const FlatGroup& group, StateKind kind, Extent run, Direction direction,
                    std::vector<std::int64_t>& numbers);

/// Returns the view's run in the form that the optimizer takes.
OptimizerSlice optimizer_slice(const FlatGroup& group, const StateView& view);

/// Returns the gradients of the slice. The optimizer may overwrite them.
std::span<float> gradients_of(const FlatGroup& group, const OptimizerSlice& slice);

/// Returns those elements of a group's optimizer part that have their masters and states in memory. They are the first
/// elements of the part, or all of them if the group has no records.
Extent run_in_memory(const FlatGroup& group);
/// Returns the view of `run`, which is a part of run_in_memory(group).
StateView states_in_memory(const FlatGroup& group, Extent run);

/// Returns the elements of the optimizer part that are in a chunk, as a run of the flat buffer.
Extent run_of_chunk(const FlatGroup& group, std::int64_t chunk);

/// Returns the view of `run`, elements of a chunk that has a record. The record, or its copy on the device that trains,
/// begins at `bytes`. Pointers to state outside of records do not change. `chunk`: from
/// RecordLayout::first_record to RecordLayout::chunks.
StateView states_in_record(const FlatGroup& group, std::int64_t chunk, Extent run, std::byte* bytes);

/// A run of elements whose parameters lie together: in memory, or in one record.
struct ParameterPiece {
  static constexpr std::int64_t kNoRecord = -1;
  Extent run;                       ///< elements of the group's flat buffer
  std::int64_t record = kNoRecord;  ///< record of the parameters, or kNoRecord if they are in memory
  std::int64_t offset = 0;          ///< bytes of the record before the first of the parameters
};
/// Calls `visit(piece)` for the pieces of `run`, which lies in the group's parameter part.
void for_each_parameter_piece(const FlatGroup& group, Extent run, Direction direction,
                              c10::function_ref<void(const ParameterPiece&)> visit);
/// Makes the view's parameters point to `parameters`, memory that the training device can reach. The view's masters
/// point there too if the parameters are their own masters (fp32).
void point_at_parameters(StateView& view, const FlatGroup& group, std::byte* parameters);

/// One whole state of one parameter or of several, in memory of the host: its numbers, and its scales if it has any.
struct JoinedState {
  std::vector<std::byte> data, scales;
};

/// Copies this rank's part of a state from `joined`, in which the parameter begins at element `begin`, to parameter `i`
/// of `target`. `state`: number of the state among those of the parameter.
void hand_out(const JoinedState& joined, std::int64_t begin, FlatGroup& target, std::size_t i, std::size_t state);

/// Copies this rank's part of a state of the whole tensor (GroupShape::tensor_states) from `values`, which holds the
/// whole state. `state`: number of the state among those of parameter `i`.
void hand_out_tensor_state(const float* values, FlatGroup& target, std::size_t i, std::size_t state);

}  // namespace tessera
