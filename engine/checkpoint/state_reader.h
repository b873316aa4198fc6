#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/matched_checkpoint.h"
#include "engine/checkpoint/stored_states.h"
#include "engine/memory/frozen_states.h"
#include "sharding/unit.h"

namespace tessera {

/// Reads this rank's parts of parameters, masters and states from a checkpoint to their places in memory, in files or
/// on a GPU, one portion after the other. load_checkpoint makes a StateReader on each rank and calls `read` once.
class StateReader {
 public:
  /// `states`: the Engine's states. `rank`, `ranks`: this rank and the number of ranks that load. The referenced
  /// objects must outlive the StateReader.
  StateReader(SavedCheckpoint& checkpoint, const MatchedCheckpoint& matched, const StoredStates& states, int rank,
              int ranks)
      : checkpoint_(checkpoint), matched_(matched), states_(states), rank_(rank), ranks_(ranks) {}

  /// Reads the values and states of all parameters, and returns the states of frozen parameters. Errors: those of
  /// SavedCheckpoint::read. After an error some values come from the checkpoint and others do not.
  absl::StatusOr<FrozenStates> read();

 private:
  absl::Status read_states(const MatchedParameter& parameter);
  absl::Status read_value(const MatchedParameter& parameter);
  /// Reads fp32 parameters, which have no separate masters, into their own memory.
  absl::Status read_f32_value(const MatchedParameter& parameter);
  /// `state`: the state's index among those of the parameter's group (StoredStates::of).
  absl::Status read_state(const MatchedParameter& parameter, std::size_t state);
  absl::Status read_tensor_states(const MatchedParameter& parameter);
  absl::Status read_scales(const MatchedParameter& parameter, std::size_t state, Extent run);
  void clear_states(const MatchedParameter& parameter) const;

  SavedCheckpoint& checkpoint_;
  const MatchedCheckpoint& matched_;
  const StoredStates& states_;
  const int rank_, ranks_;
};

}  // namespace tessera
