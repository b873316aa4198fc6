#pragma once

#include <absl/status/statusor.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "engine/engine_saving.h"
#include "engine/saving/checkpoint_save.h"
#include "runtime/comm/collectives.h"
#include "tessera/checkpoint.h"

namespace tessera {

/// Writes a checkpoint on a separate thread, from a copy of all data that it writes (CheckpointSave::hold). The Engine
/// of each rank owns a BackgroundSave. The threads of the ranks communicate over a group that no other code uses
/// meanwhile.
class BackgroundSave final : public SaveUnderWay {
 public:
  /// Starts the thread. REQUIRES: `save` has its copy (CheckpointSave::hold).
  BackgroundSave(std::unique_ptr<CheckpointSave> save, std::shared_ptr<Collectives> control);
  /// Waits for the thread. A failure that `wait` has not returned is logged, and ends tessera::run with its exit code.
  ~BackgroundSave() override;
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  CheckpointProgress progress() const override;
  bool has_ended() const override { return has_ended_; }
  absl::StatusOr<std::string> wait() override;
  void cancel() override { save_->cancel(); }

 private:
  absl::StatusOr<std::string> run();

  const std::unique_ptr<CheckpointSave> save_;
  const std::shared_ptr<Collectives> control_;
  absl::StatusOr<std::string> result_;  ///< the thread owns this until it has ended
  std::atomic<bool> has_ended_ = false;
  bool is_told_ = false;  ///< whether `wait` has returned the result
  std::thread thread_;
};

}  // namespace tessera
