#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "engine/job/job.h"
#include "engine/memory/durable_files.h"
#include "engine/moved_commits.h"
#include "tessera/checkpoint.h"

namespace tessera {

/// The Engine's interface to a save that runs while training continues. engine/saving makes it (BackgroundSave).
/// Its destructor waits for the end.
class SaveUnderWay {
 public:
  virtual ~SaveUnderWay() = default;
  virtual CheckpointProgress progress() const = 0;
  virtual bool has_ended() const = 0;
  /// Waits for the end. Returns the checkpoint's path, or an error that is the same on every rank.
  virtual absl::StatusOr<std::string> wait() = 0;
  /// Makes the save fail soon. It is called when training ends with an error.
  virtual void cancel() = 0;
};

/// The third of an Engine's three parts: all that is written to disk while training continues. The functions are in
/// engine/saving.
struct Saving {
  /// The checkpoint to which a spike goes back (SpikeAction::kRollback).
  struct LastCheckpoint {
    std::string path;  ///< path of the checkpoint that was saved or loaded last; empty: none
    int returns = 0;   ///< number of times that spikes have gone back to this checkpoint
  };

  explicit Saving(Job& job_given) : job(job_given) {}

  /// Returns whether a save is under way and every rank's thread has ended. It is collective where a save is under way.
  bool save_has_ended() const;
  /// It is called before training state changes. It waits for the commit under way. That commit then becomes the last
  /// commit or, after a failure, is removed on all ranks; the next commit reports the failure. It is collective if
  /// there is a commit.
  void settle_commit();
  /// Waits for the commit under way when the Engine is destroyed, without the other ranks. A failure that was not
  /// reported is logged, and ends tessera::run with its exit code.
  void leave_commit();

  Job& job;
  std::shared_ptr<Collectives> group;       ///< group of the saving thread; null unless CheckpointConfig::async
  std::unique_ptr<SaveUnderWay> under_way;  ///< null unless a save is under way; the same on all ranks
  std::jthread removal;                     ///< thread on which rank 0 removes old checkpoints while training continues
  bool ends_in_step = true;                 ///< whether a step that sees the end of a save throws the save's error
  LastCheckpoint last_checkpoint;
  std::unique_ptr<DurableFiles> durable;  ///< null without "durable"
  std::optional<MovedCommits> moved;      ///< commits of other ranks, until the program continues from them
  absl::Status commit_failure;            ///< failure of the latest commit, until the program gets it
  bool commit_ended_job = false;          ///< whether the job failed because of `commit_failure`, so that the program
                                          ///< has this error already
};

}  // namespace tessera
