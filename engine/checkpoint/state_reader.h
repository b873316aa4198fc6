#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/matched_checkpoint.h"
#include "engine/checkpoint/stored_states.h"
#include "sharding/unit.h"

namespace tessera {

/// Brings this rank's parts of parameters, masters and states from a checkpoint to where they lie, a portion after the other.
class StateReader {
 public:
  /// `states`: the Engine's.
  StateReader(SavedCheckpoint& checkpoint, const MatchedCheckpoint& matched, const StoredStates& states)
      : checkpoint_(checkpoint), matched_(matched), states_(states) {}

  /// Values and states of all parameters. After an error some are the checkpoint's, others are not.
  absl::Status read();

 private:
  absl::Status read_value(const MatchedParameter& parameter);
  /// For parameters that are the masters: in place.
  absl::Status read_f32_value(const MatchedParameter& parameter);
  /// `state`: of the group's.
  absl::Status read_state(const MatchedParameter& parameter, std::size_t state);
  absl::Status read_tensor_states(const MatchedParameter& parameter);
  absl::Status read_scales(const MatchedParameter& parameter, std::size_t state, Extent run);
  void clear_states(const MatchedParameter& parameter) const;

  SavedCheckpoint& checkpoint_;
  const MatchedCheckpoint& matched_;
  const StoredStates& states_;
};

}  // namespace tessera
