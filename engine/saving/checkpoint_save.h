#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/manifest.h"
#include "engine/checkpoint/state_writer.h"
#include "engine/checkpoint/stored_states.h"
#include "engine/training/training.h"
#include "runtime/comm/collectives.h"
#include "tessera/checkpoint.h"

namespace tessera {

/// Removes the old checkpoints that CheckpointSave::take_pruned returned. A failure is only logged as a warning,
/// because the new checkpoint is valid even if old checkpoints stay.
void remove_old_checkpoints(const std::vector<std::string>& pruned);

/// Writes one checkpoint. EngineCheckpoints::save makes a CheckpointSave on every rank, and all ranks call the same
/// functions: `begin`; then `hold`, if training is to continue meanwhile; then `end`. An error of one of these is the
/// same on every rank, and nothing may be called after it. Nothing can be loaded until `end` has returned ok; the
/// destructor removes a checkpoint that is not finished.
class CheckpointSave {
 public:
  using Buffers = std::vector<std::pair<std::string, at::Tensor>>;  ///< names and copies in host memory

  CheckpointSave(Training& training, std::string folder, CheckpointItems items, const SaveOptions& options);

  /// Notes everything that the checkpoint holds in addition to flat buffers, and makes its folder. It is collective
  /// over the Engine's ranks. Errors: 64 for an item that cannot be written; those of making the folder.
  absl::Status begin();
  /// Copies this rank's part of flat buffers to `room`. After this call nothing of the Engine is read. It is collective
  /// over the Engine's ranks.
  absl::Status hold(std::span<std::byte> room);
  /// Writes this rank's file; once all ranks have done so, rank 0 commits the checkpoint. Returns its path. It is
  /// collective over `control`, which has the same ranks as the Engine. Any thread may call it after `hold`. Throws
  /// tessera::Error if the other ranks cannot be reached.
  absl::StatusOr<std::string> end(Collectives& control);

  /// Returns the old checkpoints that SaveOptions::keep has set aside, for remove_old_checkpoints. Call it after `end`.
  /// The result is empty on all ranks except rank 0.
  std::vector<std::string> take_pruned() { return std::move(pruned_); }

  std::int64_t step() const { return manifest_.step; }
  /// Returns the path that the checkpoint has once it is committed.
  const std::string& path() const { return path_; }
  /// These return the bytes of this rank's file without header, and how many of them were given to the system so far.
  /// Any thread may call them.
  std::int64_t bytes() const { return writer_->bytes(); }
  std::int64_t written() const { return written_; }
  /// Makes `end`, which runs on another thread, fail soon. Any thread may call it.
  void cancel() { is_cancelled_ = true; }

 private:
  absl::StatusOr<std::string> note();
  absl::Status copy_items();
  std::vector<std::int64_t> ranks_with_own(std::size_t i) const;
  void add_tensors();
  void add_outer_momentum();
  absl::StatusOr<std::string> write();
  absl::StatusOr<std::string> commit(const std::vector<std::string>& files);

  Training* training_;  ///< null after `hold`: the Training must not be read any more
  const std::string folder_;
  const CheckpointItems items_;
  const SaveOptions options_;
  const int rank_;
  const std::string who_;
  const StoredStates states_;
  Buffers buffers_, host_items_;
  std::unique_ptr<UnfinishedCheckpoint> unfinished_;  ///< null on all ranks except rank 0
  std::vector<std::string> hashes_;                   ///< [rank]: hashes of its buffers
  std::string unfinished_path_, path_;
  Manifest manifest_;  ///< complete except for its files, which `commit` adds
  std::vector<std::string> pruned_;
  std::optional<StateWriter> writer_;
  std::atomic<std::int64_t> written_ = 0;
  std::atomic<bool> is_cancelled_ = false;
};

}  // namespace tessera
