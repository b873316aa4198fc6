#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine_checkpoints.h"
#include "engine/saving/background_save.h"
#include "engine/saving/checkpoint_save.h"
#include "engine/step/outer_steps.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"

namespace tessera {

std::string EngineCheckpoints::save(const std::string& folder, const CheckpointItems& items,
                                    const SaveOptions& options) {
  expect(s_.microbatch == 0,
         "save_checkpoint between backward and step. [T0264] hint: call step() or zero_grad() first");
  s_.expect_weights("save_checkpoint");
  expect(s_.open_guards == 0, "save_checkpoint under a Gathered guard. [T0265] hint: close that guard first");
  expect(!s_.half_loaded,
         "save_checkpoint after load_checkpoint failed half-way: the values are of no one step. [T0266] hint: load a "
         "checkpoint that is whole, or make the Engine anew");
  expect(options.keep >= 0, "save_checkpoint: keep is ", options.keep,
         ", and wanted is how many checkpoints stay. [T0267] hint: 0 keeps all");
  if (s_.saving && !s_.saving->has_ended() && s_.mesh.rank() == 0)
    log_warning("save_checkpoint waits for the checkpoint of step " + std::to_string(s_.saving->progress().step) +
                ", which is still being written. [T0268] hint: save less often, or to a faster disk");
  finish();
  std::vector<std::string> pruned;
  std::string path = value_or_throw(s_.or_abort("save_checkpoint", [&]() -> absl::StatusOr<std::string> {
    s_.expect_parameters();
    if (s_.outer) {
      s_.bring_replicas_together("save_checkpoint");
      s_.outer->meet(*s_.step);
    }
    auto save = std::make_unique<CheckpointSave>(s_, folder, items, options);
    TESSERA_RETURN_IF_ERROR(save->begin());
    if (!s_.strategy.checkpoint.async) {
      absl::StatusOr<std::string> saved = save->end(*s_.whole.control);
      pruned = save->take_pruned();
      return saved;
    }
    const Arena& room = s_.memory.checkpoint;
    TESSERA_RETURN_IF_ERROR(save->hold({room.data(), static_cast<std::size_t>(room.bytes())}));
    s_.saving = std::make_unique<BackgroundSave>(std::move(save), s_.save_group);
    return s_.saving->progress().path;
  }));
  if (!s_.saving) note_last(path);
  if (pruned.empty()) return path;
  try {
    s_.removal = std::jthread([pruned] { remove_old_checkpoints(pruned); });
  } catch (const std::system_error&) {  // no more threads
    remove_old_checkpoints(pruned);
  }
  return path;
}

void EngineCheckpoints::finish() {
  if (s_.removal.joinable()) s_.removal.join();
  if (!s_.saving) return;
  const absl::StatusOr<std::string> saved = s_.saving->wait();
  s_.saving.reset();
  note_last(value_or_throw(saved));
}

bool EngineCheckpoints::save_has_ended() const { return s_.saving && s_.saving->has_ended(); }

std::optional<CheckpointProgress> EngineCheckpoints::progress() const {
  return s_.saving ? std::optional(s_.saving->progress()) : std::nullopt;
}

std::string save_checkpoint(Engine& engine, const std::filesystem::path& folder, const CheckpointItems& items,
                            const SaveOptions& options) {
  return EngineCheckpoints(engine).save(folder.string(), items, options);
}

void finish_checkpoint(Engine& engine) { EngineCheckpoints(engine).finish(); }

std::optional<CheckpointProgress> checkpoint_progress(Engine& engine) { return EngineCheckpoints(engine).progress(); }

}  // namespace tessera
