#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct Job;

// A run with "reproducible" can also continue from commits ("durable") that another number of ranks has made. A commit
// has the form in which its ranks keep memory, so a checkpoint is made of it first, in the folder `moved-commits` of
// durable.dir. For this, rank 0 makes the ranks that committed once more, as threads of its process. Each of them has
// an Engine over a module with the names, sizes and types of the program's module. They go on from their last commit
// and save it, and make no step.
//
// The old commits are removed when this checkpoint is whole. The checkpoint is removed when the new ranks have
// committed. If a run is killed at any moment in between, the next run continues from the commits or from the
// checkpoint. If both exist, it takes the commits if all ranks have them and if they are of a later step. Otherwise it
// takes the checkpoint.

/// Commits of another number of ranks, which have become a checkpoint. resume_durable continues from it.
struct MovedCommits {
  std::string path;                  ///< path of the checkpoint
  std::int64_t step = 0;             ///< step of the commits
  std::vector<std::string> inexact;  ///< what the old ranks could not keep (LoadedCheckpoint::inexact)
};

/// Makes a checkpoint of the commits in durable.dir if another number of ranks has made them, or completes what a
/// killed run has left. Returns nothing if the Engine's own commits are there, or none. An Engine calls it before it
/// opens its commits. Only rank 0 works, with the memory of all ranks that committed; the other ranks wait for it at
/// most comm.timeout_s. The call is collective. Throws tessera::Error, the same on every rank: 66 if files of other
/// hosts' ranks are missing; 78 on a GPU, or if this run computes with another processor; 65 if the commits belong to
/// another model or strategy; the errors of CommitLog and of save_checkpoint. After an error the commits are as they
/// were.
std::optional<MovedCommits> move_commits(const Job& job);

/// Removes the checkpoint that was made of commits, if there is one; a failure is only logged. Rank 0 calls it when all
/// ranks have committed. `dir`: DurableConfig::dir.
void remove_moved_checkpoint(const std::string& dir);

}  // namespace tessera
