#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>

#include "checkpoint/saved_checkpoint.h"

namespace tessera {

/// The largest number of files into which a checkpoint is cut.
inline constexpr std::int64_t kMostShards = 65536;

/// Writes what `from` holds to a new checkpoint in `folder`, cut into `files` files of about as many elements each, and
/// returns its path; `folder`/latest names it. Numbers and texts stay the same, so it loads as `from` does, at any
/// number of ranks.
///
/// Parameters with their states are cut where a state's blocks of 256 elements end; everything else, which is little,
/// goes to the first file. Every byte that is read is checked against its hash. It takes a few MiB of memory. `who`
/// is the prefix of messages. Errors: 65, 74, 77 if `from` cannot be read; those of UnfinishedCheckpoint and
/// ShardWriter if the new checkpoint cannot be written, and no file is left then.
absl::StatusOr<std::string> reshard_checkpoint(SavedCheckpoint& from, const std::string& folder, std::int64_t files,
                                               const std::string& who);

}  // namespace tessera
