#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/commands.h"

namespace tessera::app {

// A `tessera train` with "reproducible" also goes on from commits ("durable") that another number of ranks has made. A
// commit has the form in which its ranks keep memory, so rank 0 first makes a checkpoint of it (`tessera checkpoint
// from-commits`), in the folder `moved-commits` of durable.dir. The old commits are removed when this checkpoint is
// whole. The checkpoint is removed when the new ranks have committed. A run that is killed at any moment in between
// goes on from the commits or from the checkpoint: the later one counts, and the checkpoint if they are of the same
// step.

/// Makes a checkpoint of the commits if another number of ranks has made them, or completes what a killed run has left.
/// Rank 0 calls it before ranks meet; other ranks wait for it at most as long as comm.init_timeout_s says. It does
/// nothing without "durable" and --resume auto, and on other ranks. Errors: 66 if files of other hosts' ranks are
/// missing; the command's code if no checkpoint could be made, whose reason was printed before; those of CommitLog.
absl::Status move_commits(const TrainCommand& command, const Strategy& strategy, const Topology& topology);

/// Returns the path of the checkpoint that was made of commits; empty if there is none.
absl::StatusOr<std::string> moved_checkpoint(const Strategy& strategy);
/// Returns the step of that checkpoint; nothing if there is none.
absl::StatusOr<std::optional<std::int64_t>> moved_step(const Strategy& strategy);

/// Returns the path of the checkpoint with the larger step; `path` if their steps are equal. Either may be empty.
absl::StatusOr<std::string> later_checkpoint(const std::string& path, const std::string& other);

/// Removes that checkpoint. Rank 0 calls it when the run has committed.
void remove_moved_checkpoint(const Strategy& strategy);

}  // namespace tessera::app
