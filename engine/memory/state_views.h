#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/memory/host_view.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// Training state of a run of elements, in memory while somebody visits it.
struct StateView {
  Extent run;                      ///< of the group's flat buffer
  std::byte* parameter = nullptr;  ///< as in FlatGroup, of the run's first element
  float* master = nullptr;         ///< likewise; `parameter` itself where dtype is fp32
  std::int16_t* low = nullptr;     ///< likewise
  /// Likewise; begins with the scale of the run's first block.
  std::array<FlatGroup::State, kMostStates> state;
  /// Where these are: host code reaches them through HostView. `masters_place`: of `master` and `low`.
  MemoryPlace parameter_place = c10::Device(c10::kCPU), masters_place = parameter_place, states_place = parameter_place;
};

enum class StateUse : std::uint8_t {
  kRead,
  kUpdateStates,  ///< parameters are only read
  kUpdate,
};
enum class Direction : std::uint8_t { kForward, kBackward };

/// What of a run is visited. Of the rest, a view has only what is in memory.
enum class StateKind : std::uint8_t {
  kParameters,        ///< runs lie in the group's parameter part
  kMastersAndStates,  ///< runs lie in its optimizer part
  kAll,               ///< likewise
};

/// Calls `visit(view)` for state of a kind, of `run`: at once for what is in memory, and record by record for what lies
/// below. From several threads at once, for runs that do not overlap. Throws tessera::Error (74) if a record cannot be read
/// or written.
void for_each_state(const FlatGroup& group, StateKind kind, Extent run, StateUse use,
                    c10::function_ref<void(const StateView&)> visit, Direction direction = Direction::kForward);

/// This rank's part of a group's tensor states, in memory while somebody visits it.
struct TensorStatesView {
  Extent part;  ///< FlatGroup::tensor_state_part
  float* states;
  MemoryPlace place;
  float* at(std::int64_t element) const { return states + (element - part.offset); }
};
/// REQUIRES: there are some. Throws as for_each_state. `use`: kRead or kUpdate.
void visit_tensor_states(const FlatGroup& group, StateUse use, c10::function_ref<void(const TensorStatesView&)> visit);

/// Appends the numbers of the records that `for_each_state` would visit, of parameters or of masters and states, in its
/// order, each once in a row.
void append_records(const FlatGroup& group, StateKind kind, Extent run, Direction direction,
                    std::vector<std::int64_t>& numbers);

/// The view's run as the optimizer takes it.
OptimizerSlice optimizer_slice(const FlatGroup& group, const StateView& view);

/// The gradients of the slice, which its optimizer may overwrite.
std::span<float> gradients_of(const FlatGroup& group, const OptimizerSlice& slice);

/// The first elements of a group's optimizer part, whose masters and states lie in memory: all of them where it has no records.
Extent run_in_memory(const FlatGroup& group);
StateView states_in_memory(const FlatGroup& group, Extent run);

/// The elements of the optimizer part that a chunk has, as a run of the flat buffer.
Extent run_of_chunk(const FlatGroup& group, std::int64_t chunk);

/// `run`, some elements of a chunk that has a record, which begins at `bytes`: where it lies, or on the device that trains, where it was
/// brought to. What has no record is where it is. `chunk`: RecordLayout::first_record to chunks.
StateView states_in_record(const FlatGroup& group, std::int64_t chunk, Extent run, std::byte* bytes);

/// Some elements whose parameters lie in one place.
struct ParameterPiece {
  static constexpr std::int64_t kNoRecord = -1;
  Extent run;                       ///< of the group's flat buffer
  std::int64_t record = kNoRecord;  ///< the parameters' record, or none where they are in memory
  std::int64_t offset = 0;          ///< bytes of the record in front of them
};
/// Calls `visit(piece)` for the pieces of `run`, some of the group's parameter part.
void for_each_parameter_piece(const FlatGroup& group, Extent run, Direction direction,
                              c10::function_ref<void(const ParameterPiece&)> visit);
/// The view's parameters, and its masters where they are those, lie there, which the device that trains reaches.
void point_at_parameters(StateView& view, const FlatGroup& group, std::byte* parameters);

}  // namespace tessera
