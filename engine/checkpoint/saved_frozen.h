#pragma once

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

/// What checkpoints and commits hold of frozen parameters, beside their values: FrozenStates of all ranks, of which each writes its own
/// shares. What a checkpoint has of a parameter that is frozen in the Engine becomes FrozenStates again, whether it was frozen in the
/// run that saved or trained there.

/// Writes into `saved` what is kept of a frozen parameter, and adds states to `states` that are not there yet.
void describe_frozen(const FrozenParameter& kept, SavedParameter& saved, std::vector<SavedState>& states);

/// Adds this rank's shares to what it writes. They are not copied, and may be written while the Engine trains.
void add_frozen(const FrozenStates& frozen, const std::vector<std::unique_ptr<Unit>>& units, int rank, int ranks,
                StateWriter& writer);

/// The format in which a frozen parameter keeps a state that the checkpoint has of it; nothing where the Engine's optimizer has no such
/// state. `stored`: the Engine's.
std::optional<StateDType> kept_format(const SavedState& state, const SavedParameter& saved, const StoredStates& stored);

/// This rank's shares of what the checkpoint has of a parameter of `group`, which is frozen. REQUIRES: match_checkpoint found that formats
/// can be converted. Errors: those of SavedCheckpoint::read.
absl::StatusOr<FrozenParameter> read_frozen(SavedCheckpoint& checkpoint, const SavedParameter& saved,
                                            const FlatGroup& group, const StoredStates& stored, int rank, int ranks);

/// All shares of this rank, as bytes of a commit; parameters by their numbers. Empty where there are none.
std::string write_frozen(const FrozenStates& frozen, const std::vector<std::unique_ptr<Unit>>& units);
/// The reverse, for the same units. False for any other bytes.
bool read_frozen(std::string_view bytes, const std::vector<std::unique_ptr<Unit>>& units, FrozenStates& frozen);

}  // namespace tessera
