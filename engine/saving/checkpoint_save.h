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
#include "engine/engine_checkpoints.h"
#include "runtime/comm/collectives.h"
#include "tessera/checkpoint.h"

namespace tessera {

/// Removes what CheckpointSave::take_pruned has given. A failure is a warning: old checkpoints that stay are no reason to lose a new one.
void remove_old_checkpoints(const std::vector<std::string>& pruned);

/// One checkpoint in the making. Every rank makes one, and all do the same steps: `begin`; `hold`, if training is to go on meanwhile;
/// `end`. An error of one of these is the same on every rank, and the last thing to be asked for. Until `end` has returned ok nothing
/// can be loaded; the destructor removes what was written.
class CheckpointSave {
 public:
  using Buffers = std::vector<std::pair<std::string, at::Tensor>>;  ///< by name, in host memory

  CheckpointSave(EngineCheckpoints::State& s, std::string folder, CheckpointItems items, const SaveOptions& options);

  /// Notes all that the checkpoint says beside its flat buffers, and makes its folder. Collective over the Engine's ranks.
  absl::Status begin();
  /// Copies what this rank writes of flat buffers to `room`. From then on nothing of the Engine is read. Collective, as `begin`.
  absl::Status hold(std::span<std::byte> room);
  /// Writes this rank's file; when all ranks have, the checkpoint is committed. Its path. Collective over `control`, which has the same
  /// ranks. After `hold` on any thread. Throws tessera::Error where the ranks cannot be reached.
  absl::StatusOr<std::string> end(Collectives& control);

  /// After `end`: old checkpoints that SaveOptions::keep has set aside, for remove_pruned. Rank 0's; empty on others.
  std::vector<std::string> take_pruned() { return std::move(pruned_); }

  std::int64_t step() const { return manifest_.step; }
  /// The checkpoint's path, once it is committed.
  const std::string& path() const { return path_; }
  /// Bytes of this rank's file, without its head, and how many of them were given to the system. Of any thread.
  std::int64_t bytes() const { return writer_->bytes(); }
  std::int64_t written() const { return written_; }
  /// Lets `end`, on another thread, fail soon. Of any thread.
  void cancel() { is_cancelled_ = true; }

 private:
  absl::StatusOr<std::string> note();
  absl::Status copy_items();
  std::vector<std::int64_t> ranks_with_own(std::size_t i) const;
  void add_tensors();
  void add_outer_momentum();
  absl::StatusOr<std::string> write();
  absl::StatusOr<std::string> commit(const std::vector<std::string>& files);

  EngineCheckpoints::State* s_;  ///< null once nothing of it may be read
  const std::string folder_;
  const CheckpointItems items_;
  const SaveOptions options_;
  const int rank_;
  const std::string who_;
  const StoredStates states_;
  Buffers buffers_, host_items_;
  std::unique_ptr<UnfinishedCheckpoint> unfinished_;  ///< rank 0's
  std::vector<std::string> hashes_;                   ///< of the buffers, by rank
  std::string unfinished_path_, path_;
  Manifest manifest_;  ///< without its files
  std::vector<std::string> pruned_;
  std::optional<StateWriter> writer_;
  std::atomic<std::int64_t> written_ = 0;
  std::atomic<bool> is_cancelled_ = false;
};

}  // namespace tessera
