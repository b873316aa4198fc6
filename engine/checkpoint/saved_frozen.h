#pragma once

// See docs/glossary.md: unit.

#include <absl/status/statusor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/state_writer.h"
#include "engine/checkpoint/stored_states.h"
#include "engine/memory/frozen_states.h"
#include "sharding/unit.h"

namespace tessera {

/// Frozen parameters in checkpoints and durable commits: the optimizer states and masters that are kept for them, in
/// addition to their values. Each rank writes its own shares of FrozenStates. A parameter that is frozen in the Engine
/// gets FrozenStates from a checkpoint, whether it was frozen or trained in the run that saved it.

/// Describes in `saved` the states and masters that are kept for a frozen parameter, and adds its states to `states` if
/// they are not there yet.
void describe_frozen(const FrozenParameter& kept, SavedParameter& saved, std::vector<SavedState>& states);

/// Gives this rank's shares to `writer`. They are not copied: the writer shares them with `frozen`, so they
/// may be written while the Engine trains.
void add_frozen(const FrozenStates& frozen, const std::vector<std::unique_ptr<Unit>>& units, int rank, int ranks,
                StateWriter& writer);

/// Returns the format in which a frozen parameter keeps the state `state` of the checkpoint. Returns nothing if the
/// Engine's optimizer has no such state. `stored` are the Engine's states.
std::optional<StateDType> kept_format(const SavedState& state, const SavedParameter& saved, const StoredStates& stored);

/// Reads this rank's shares of the states and the master that the checkpoint has for the parameter `saved`. The
/// parameter belongs to `group`, which is frozen. REQUIRES:
/// match_checkpoint found that the formats can be converted. Errors: those of SavedCheckpoint::read.
absl::StatusOr<FrozenParameter> read_frozen(SavedCheckpoint& checkpoint, const SavedParameter& saved,
                                            const FlatGroup& group, const StoredStates& stored, int rank, int ranks);

/// Returns all shares of this rank as bytes for a durable commit. The bytes name parameters by their numbers. They are
/// empty if there are no shares.
std::string write_frozen(const FrozenStates& frozen, const std::vector<std::unique_ptr<Unit>>& units);
/// Fills `frozen` from the bytes that write_frozen returned, for the same units. Returns false if write_frozen cannot
/// have returned these bytes.
bool read_frozen(std::string_view bytes, const std::vector<std::unique_ptr<Unit>>& units, FrozenStates& frozen);

}  // namespace tessera
