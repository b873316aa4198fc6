#pragma once

// See docs/glossary.md: unit.

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

/// A parameter of the Engine, and the checkpoint's entry for it.
struct MatchedParameter {
  FlatGroup* group = nullptr;
  std::size_t index = 0;  ///< index in group->parameters
  const SavedParameter* saved = nullptr;
};

/// The parts of an Engine, each with the part of a checkpoint that belongs to it.
struct MatchedCheckpoint {
  std::vector<MatchedParameter> parameters;  ///< all parameters, in unit, group and layout order
  std::vector<const SavedState*> states;     ///< one for each of StoredStates::all(); null: the state begins anew
  std::vector<std::string> inexact;          ///< the lines of LoadedCheckpoint::inexact that are about values
};

/// Finds the counterpart of every parameter, buffer and state by name. Loading a checkpoint calls it on every rank,
/// before anything is changed. `whole`: the module's buffers; `states`: the states of the Engine. The result refers to
/// `manifest` and the units. Errors: 65. The message lists the first 20 faults, and says how many more there are. A
/// fault is a parameter or buffer that only one side has, or a difference in shape, strides or aliases, or a type that
/// cannot be converted. Another fault is a state that the checkpoint lacks, or has in a format that cannot be
/// converted.
absl::StatusOr<MatchedCheckpoint> match_checkpoint(const std::vector<std::unique_ptr<Unit>>& units,
                                                   const NamedTensors& whole, const StoredStates& states,
                                                   const Manifest& manifest);

/// Returns the parameter's strides as SavedParameter has them. The result is empty if the parameter's elements lie as
/// in a contiguous tensor.
std::vector<std::int64_t> saved_strides(const FlatParameter& parameter);

}  // namespace tessera
