#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "engine/checkpoint/stored_states.h"
#include "sharding/unit.h"
#include "sharding/whole_tensors.h"

namespace tessera {

/// A parameter of the Engine, and what the checkpoint has of it.
struct MatchedParameter {
  FlatGroup* group = nullptr;
  std::size_t index = 0;  ///< in the group
  const SavedParameter* saved = nullptr;
};

/// What of a checkpoint goes where.
struct MatchedCheckpoint {
  std::vector<MatchedParameter> parameters;  ///< in unit, group and layout order
  std::vector<const SavedState*> states;     ///< of each of StoredStates::all()
  std::vector<std::string> inexact;          ///< LoadedCheckpoint::inexact, as far as values are concerned
};

/// Finds everything's counterpart by name. `states`: the Engine's. Errors (65), with all names at once: a
/// parameter or buffer that only one side has, other shapes, strides or aliases, states that the checkpoint lacks or has in a format
/// that cannot be converted. Refers to `manifest`.
absl::StatusOr<MatchedCheckpoint> match_checkpoint(const std::vector<std::unique_ptr<Unit>>& units,
                                                   const NamedTensors& whole, const StoredStates& states,
                                                   const Manifest& manifest);

/// As SavedParameter has it: empty where elements lie as in a contiguous tensor.
std::vector<std::int64_t> saved_strides(const FlatParameter& parameter);

}  // namespace tessera
