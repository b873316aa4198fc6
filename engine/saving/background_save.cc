#include "engine/saving/background_save.h"

#include <exception>
#include <utility>

#include "engine/job/last_words.h"
#include "engine/job/run_scope.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"

namespace tessera {

BackgroundSave::BackgroundSave(std::unique_ptr<CheckpointSave> save, std::shared_ptr<Collectives> control)
    : save_(std::move(save)), control_(std::move(control)), thread_([this] {
        result_ = run();
        has_ended_ = true;
      }) {}

BackgroundSave::~BackgroundSave() {
  const bool is_told = is_told_;
  const absl::StatusOr<std::string> result = wait();
  if (is_told || result.ok()) return;
  log_error(message_of(result.status()));
  if (RunScope::current) RunScope::current->late_failure.Update(result.status());
}

CheckpointProgress BackgroundSave::progress() const {
  return {save_->path(), save_->step(), save_->written(), save_->bytes()};
}

absl::StatusOr<std::string> BackgroundSave::wait() {
  if (thread_.joinable()) thread_.join();
  is_told_ = true;
  return result_;
}

absl::StatusOr<std::string> BackgroundSave::run() {
  absl::StatusOr<std::string> result;
  try {
    result = save_->end(*control_);
  } catch (...) {
    result = status_of(std::current_exception());
  }
  if (result.ok()) {
    remove_old_checkpoints(save_->take_pruned());
    return result;
  }
  return make_error(exit_code_of(result.status()), "the checkpoint of step " + std::to_string(save_->step()) +
                                                       " was not saved: " + message_of(result.status()));
}

}  // namespace tessera
