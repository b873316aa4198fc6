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

// A `tessera train` with "reproducible" can also continue from commits ("durable") that another number of ranks has
// made. A commit has the form in which its ranks keep memory, so rank 0 first makes a checkpoint of it (`tessera
// checkpoint from-commits`), in the folder `moved-commits` of durable.dir. The old commits are removed when this
// checkpoint is whole. The checkpoint is removed when the new ranks have committed. If a run is killed at any moment in
// between, the next run continues from the commits or from the checkpoint. If both exist, it takes the commits if all
// ranks have them and if they are of a later step. Otherwise it takes the checkpoint.

/// Makes a checkpoint of the commits if another number of ranks has made them, or completes what a killed run has left.
/// It is called before ranks meet. Only rank 0 does the work; the other ranks wait for rank 0 at most
/// comm.init_timeout_s. The function does nothing if "durable" is not set, or if --resume is not auto. Errors: 66 if
/// files of other hosts' ranks are missing; the command's code if no checkpoint could be made (the command has printed
/// the reason); the errors of CommitLog.
absl::Status move_commits(const TrainCommand& command, const Strategy& strategy, const Topology& topology);

/// Returns the path of the checkpoint that was made of commits; empty if there is none.
absl::StatusOr<std::string> moved_checkpoint(const Strategy& strategy);
/// Returns the step of that checkpoint; nothing if there is none.
absl::StatusOr<std::optional<std::int64_t>> moved_step(const Strategy& strategy);

/// Returns the path of the checkpoint with the larger step; `path` if their steps are equal. Either may be empty.
absl::StatusOr<std::string> later_checkpoint(const std::string& path, const std::string& other);

/// Removes the checkpoint that was made of commits. Rank 0 calls it when the run has committed.
void remove_moved_checkpoint(const Strategy& strategy);

}  // namespace tessera::app
