#include <algorithm>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine_checkpoints.h"
#include "engine/replay/replay_request.h"
#include "engine/saving/background_save.h"
#include "engine/saving/checkpoint_save.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"

namespace tessera {

bool Saving::save_has_ended() const {
  if (!under_way) return false;
  const char own = under_way->has_ended() ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(job.axes.control->size()));
  throw_if_error(job.axes.control->all_gather("checkpoint ended", &own, all.data(), 1).wait());
  return std::ranges::all_of(all, [](char ended) { return ended == 1; });
}

std::string EngineCheckpoints::save(const std::string& folder, const CheckpointItems& items,
                                    const SaveOptions& options) {
  expect(training_.window.microbatch == 0,
         "save_checkpoint between backward and step. [T0264] hint: call step() or zero_grad() first");
  training_.expect_weights("save_checkpoint");
  expect(training_.values.open_guards == 0,
         "save_checkpoint under a Gathered guard. [T0265] hint: close that guard first");
  expect(!training_.values.half_loaded,
         "save_checkpoint after a load failed half-way: the values are of no one step. [T0266] hint: load a "
         "checkpoint that is whole, or make the Engine anew");
  expect(options.keep >= 0, "save_checkpoint wants a keep of 0 or more, got ", options.keep,
         ". [T0267] hint: it is how many checkpoints stay; 0 keeps all");
  if (saving_.under_way && !saving_.under_way->has_ended() && job_.mesh.rank() == 0)
    log_warning("save_checkpoint waits for the checkpoint of step " +
                std::to_string(saving_.under_way->progress().step) +
                ", which is still being written. [T0268] hint: save less often, or to a faster disk");
  finish();
  if (ReplayRequest::from_environment()) {
    if (job_.mesh.rank() == 0) log_info("replay: no checkpoint is saved, since the run that is replayed has saved it");
    return "";
  }
  std::vector<std::string> pruned;
  std::string path = value_or_throw(job_.or_abort("save_checkpoint", [&]() -> absl::StatusOr<std::string> {
    training_.expect_parameters();
    training_.bring_replicas_together("save_checkpoint");
    training_.sync.meet(*training_.step);
    auto save = std::make_unique<CheckpointSave>(training_, folder, items, options);
    TESSERA_RETURN_IF_ERROR(save->begin());
    if (!job_.strategy.checkpoint.async) {
      absl::StatusOr<std::string> saved = save->end(*job_.axes.control);
      pruned = save->take_pruned();
      return saved;
    }
    const Arena& room = training_.memory.checkpoint;
    TESSERA_RETURN_IF_ERROR(save->hold({room.data(), static_cast<std::size_t>(room.bytes())}));
    saving_.under_way = std::make_unique<BackgroundSave>(std::move(save), saving_.group);
    return saving_.under_way->progress().path;
  }));
  if (!saving_.under_way) note_last(path);
  if (pruned.empty()) return path;
  try {
    saving_.removal = std::jthread([pruned] { remove_old_checkpoints(pruned); });
  } catch (const std::system_error&) {  // the system has no more threads
    remove_old_checkpoints(pruned);
  }
  return path;
}

void EngineCheckpoints::finish() {
  if (saving_.removal.joinable()) saving_.removal.join();
  if (!saving_.under_way) return;
  const absl::StatusOr<std::string> saved = saving_.under_way->wait();
  saving_.under_way.reset();
  note_last(value_or_throw(saved));
}

bool EngineCheckpoints::save_has_ended() const { return saving_.under_way && saving_.under_way->has_ended(); }

std::optional<CheckpointProgress> EngineCheckpoints::progress() const {
  return saving_.under_way ? std::optional(saving_.under_way->progress()) : std::nullopt;
}

std::string save_checkpoint(Engine& engine, const std::filesystem::path& folder, const CheckpointItems& items,
                            const SaveOptions& options) {
  return EngineCheckpoints(engine).save(folder.string(), items, options);
}

void finish_checkpoint(Engine& engine) { EngineCheckpoints(engine).finish(); }

std::optional<CheckpointProgress> checkpoint_progress(Engine& engine) { return EngineCheckpoints(engine).progress(); }

}  // namespace tessera
