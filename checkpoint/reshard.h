#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>

#include "checkpoint/saved_checkpoint.h"

namespace tessera {

/// The largest number of files into which a checkpoint is cut.
inline constexpr std::int64_t kMostShards = 65536;

/// Writes the content of `from` to a new checkpoint in `folder`, with `files` files of about the same number of
/// elements each. Returns its path; `folder`/latest names it. Numbers and texts are the same, so it loads in the same
/// way as `from`, with any number of ranks.
///
/// Parameters and their element-wise states are cut at the ends of a state's blocks of 256 elements. A state of a whole
/// parameter is not cut. All residuals and momentum of one rank are written to one file, and all other content, which
/// is little, to the first file. Every byte that is read is checked against its hash. The function needs a few MiB of
/// memory. `who` is the prefix of messages. Errors: 65, 74 or 77 if `from` cannot be read; those of
/// UnfinishedCheckpoint and ShardWriter if the new checkpoint cannot be written, and no file is left then.
absl::StatusOr<std::string> reshard_checkpoint(SavedCheckpoint& from, const std::string& folder, std::int64_t files,
                                               const std::string& who);

}  // namespace tessera
