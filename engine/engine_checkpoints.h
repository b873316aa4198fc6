#pragma once

#include <optional>
#include <string>

#include "engine/engine_state.h"
#include "tessera/checkpoint.h"

namespace tessera {

/// Implements save_checkpoint, load_checkpoint, commit_durable and resume_durable, inside the Engine.
class EngineCheckpoints {
 public:
  explicit EngineCheckpoints(Engine& engine)
      : job_(engine.state_->job), training_(engine.state_->training), saving_(engine.state_->saving) {}
  /// Returns the Training, for classes of this layer other than the Engine.
  Training& training() { return training_; }

  std::string save(const std::string& folder, const CheckpointItems& items, const SaveOptions& options);
  /// Loads a checkpoint. An EngineCheckpoints that was made before may not be used afterwards, since the Engine may
  /// make another Engine::State (SyncConfig::start_step).
  static LoadedCheckpoint load(Engine& engine, const std::string& path);
  void finish();
  /// Goes back to the last checkpoint that was saved or loaded, after step number `step` was skipped because of its
  /// loss. Parameters and optimizer states get the values of the checkpoint. Step numbers, generators and rates set by
  /// hand stay as they are. The function logs a warning. It first waits for a save under way; finish() throws the error
  /// of that save. Nothing changes if there is no checkpoint, or if spikes went back to the same checkpoint too often.
  /// It is collective.
  void go_back(std::int64_t step);
  /// A program calls this if it will itself call finish() when all ranks' saves have ended. Steps then do not look
  /// whether a save has ended.
  void finish_by_hand() { saving_.ends_in_step = false; }
  /// Returns whether this rank's part of the save under way has ended, with success or with an error.
  bool save_has_ended() const;
  std::optional<CheckpointProgress> progress() const;
  bool commit(const CheckpointItems& items);
  void finish_commit();
  /// Returns the step of an earlier run's commit, if this run has not resumed from it.
  std::optional<std::int64_t> commit_to_resume() const;
  std::optional<LoadedCheckpoint> resume_durable();
  /// Returns whether the Engine has commits of another number of ranks to continue from (MovedCommits).
  bool has_moved() const { return saving_.moved.has_value(); }
  /// Continues from these commits. It loads their checkpoint, so what `load` says about other EngineCheckpoints holds
  /// here too. REQUIRES: has_moved().
  static LoadedCheckpoint resume_moved(Engine& engine);

 private:
  void expect_durable(const char* call) const;
  void note_last(const std::string& path);

  Job& job_;
  Training& training_;
  Saving& saving_;
};

}  // namespace tessera
