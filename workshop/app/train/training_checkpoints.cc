#include "workshop/app/train/training_checkpoints.h"

#include <signal.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/engine_checkpoints.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"
#include "workshop/app/train/train_report.h"

namespace tessera::app {

// This file decides after each step whether a checkpoint is saved, and whether training ends.
//
// Ranks first agree on what one of them alone may know (`agree`): a signal came, the minutes are over, or a save that
// runs during training has ended. `save` begins a save, and `end_save` ends the one under way. `attempt` turns a
// failure into a warning, as often in a row as checkpoint.failures allows. `checkpoint_to_resume` chooses the
// checkpoint from which a run goes on.

namespace {

constexpr int kStopping[] = {SIGTERM, SIGUSR1};
/// The name of the item, in a checkpoint, that holds the least loss on held-out data so far.
constexpr const char* kLeastLoss = "least_loss";

std::atomic<int> received_signal{0};

void note_signal(int signal) { received_signal.store(signal, std::memory_order_relaxed); }

/// Returns the step of a checkpoint, from its manifest.
std::int64_t step_of_checkpoint(const std::string& path) {
  return value_or_throw(SavedCheckpoint::open(path, "--resume"))->manifest().step;
}

/// One byte that a rank sends to the others after a step. It has two flags, and the number of a signal.
constexpr unsigned char kMinutesAreOver = 0x80, kSaveHasEnded = 0x40, kSignal = 0x3f;  // number of the signal

}  // namespace

absl::StatusOr<std::string> checkpoint_to_resume(const CheckpointOptions& options, const CheckpointConfig& config) {
  const auto refuse = [](const std::string& what) { return make_error(ExitCode::kUsage, "train: " + what); };
  const bool has_folder = !config.dir.empty();
  if (!has_folder && (config.every_steps > 0 || config.every_minutes > 0 || config.keep > 0 || config.failures > 0 ||
                      options.keep_best || options.signal_exit_code > 0))
    return refuse(
        "--every-steps, --every-minutes, --keep, --keep-best and --signal-exit-code, and the keys of \"checkpoint\", "
        "want a folder for checkpoints. [T0060] hint: name it by --checkpoint-dir, or by checkpoint.dir in the "
        "strategy file");
  if (options.resume == "none" || (!has_folder && options.resume == "auto")) return "";
  if (options.resume != "auto") return find_checkpoint(options.resume, "--resume");
  std::error_code error;
  if (!std::filesystem::exists(config.dir, error) && !error) return "";
  if (!error && !std::filesystem::is_directory(config.dir, error))
    return make_error(
        ExitCode::kCannotCreate,
        "--checkpoint-dir: " + config.dir + " is a file, and no folder. [T0061] hint: name a folder, or move it away");
  TESSERA_ASSIGN_OR_RETURN(const auto there, list_checkpoints(config.dir, "--checkpoint-dir"));
  if (std::filesystem::symlink_status(config.dir + "/latest", error).type() != std::filesystem::file_type::not_found)
    return find_checkpoint(config.dir, "--checkpoint-dir");
  if (!there.empty())
    return config.dir + "/" + there.back().name;  // a save was killed before it wrote `latest` for the first time
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> damaged, damaged_checkpoints(config.dir, "--checkpoint-dir"));
  if (damaged.empty()) return "";
  return make_error(
      ExitCode::kCorruptData,
      "--checkpoint-dir: " + config.dir + " has " + damaged.back() +
          " without a manifest, and no whole checkpoint. [T0954] hint: bring its files back; or begin anew, with "
          "another folder or --resume none");
}

StopSignals::StopSignals() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);  // the next signal has its usual effect
  for (const int signal : kStopping) ::sigaction(signal, &action, nullptr);
}

StopSignals::~StopSignals() {
  for (const int signal : kStopping) ::signal(signal, SIG_DFL);
}

int StopSignals::received() { return received_signal.load(std::memory_order_relaxed); }

TrainingCheckpoints::TrainingCheckpoints(Engine& engine, const CheckpointOptions& options,
                                         const models::ModelConfig& model, const Mesh& mesh)
    : engine_(engine),
      config_(engine.strategy().checkpoint),
      keeps_best_(options.keep_best),
      model_(models::to_json(model)),
      rank_(mesh.rank()),
      last_save_(std::chrono::steady_clock::now()) {
  if (config_.dir.empty()) return;
  signals_.emplace();
  ranks_ = value_or_throw(groups_of(mesh).world("training_checkpoints"));
  EngineCheckpoints(engine_).finish_by_hand();  // otherwise a step would throw a save's error and return no result
}

TrainingCheckpoints::~TrainingCheckpoints() = default;

std::int64_t TrainingCheckpoints::resume(const std::string& path, const std::optional<LoadedCheckpoint>& committed,
                                         TokenBatches& batches) {
  if (committed) take_best(committed->items);
  const std::int64_t done = committed ? committed->step : 0;
  if (path.empty() || (committed && step_of_checkpoint(path) <= done)) return done;
  const auto start = std::chrono::steady_clock::now();
  const LoadedCheckpoint loaded = load_checkpoint(engine_, path);
  if (!loaded.items.data)
    throw Error(ExitCode::kCorruptData, path +
                                            " does not say at which sample the data goes on. [T0062] hint: another "
                                            "program saved it: go on with that one, or --resume another");
  batches.resume(*loaded.items.data);
  take_best(loaded.items);
  if (rank_ == 0) {
    std::printf("resumes %s after step %lld (%.3f s)\n", loaded.path.c_str(), static_cast<long long>(loaded.step),
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  return loaded.step;
}

/// Takes the least loss from a checkpoint. A checkpoint has no such item if its program did not measure this loss.
void TrainingCheckpoints::take_best(const CheckpointItems& items) {
  const auto item = items.json.find(kLeastLoss);
  if (item == items.json.end()) return;
  const nlohmann::json loss = nlohmann::json::parse(item->second, nullptr, /*allow_exceptions=*/false);
  if (!loss.is_number())
    throw Error(ExitCode::kCorruptData,
                std::string("the checkpoint's item ") + kLeastLoss +
                    " is no number. [T0063] hint: another program saved it: load another checkpoint");
  least_loss_ = loss.get<double>();
}

/// Ranks give the same answer for the same steps, even ranks that skip some steps. If one rank meets the others at a
/// step, all ranks meet at that step.
bool TrainingCheckpoints::ranks_meet(const Place& at, bool has_measured) const {
  if (engine_.strategy().sync.type != SyncType::kBackups || has_measured || at.step == at.steps) return true;
  return passes(at.before, at.step, kStepsBetweenMeetings) || passes(at.before, at.step, config_.every_steps);
}

bool TrainingCheckpoints::after_step(const Place& at, const SamplerCursor& data, std::optional<double> held_out) {
  if (!ranks_ || !ranks_meet(at, held_out.has_value())) return false;
  const auto [before, step, steps] = at;
  const Agreed agreed = agree();
  if (agreed.save_has_ended) end_save(Failure::kIsWarned);
  report_progress();
  const bool is_regular = passes(before, step, config_.every_steps);
  const bool is_last = agreed.signal != 0 || step == steps;
  // A loss that is NaN is not less than any other loss.
  const bool is_less = held_out && (!least_loss_ || *held_out < *least_loss_) && *held_out == *held_out;
  const bool is_best = is_less && keeps_best_;
  if (is_best) end_save(Failure::kIsWarned);  // if the save of a best checkpoint fails, least_loss_ changes
  if (is_less) least_before_ = std::exchange(least_loss_, held_out);
  if (is_regular || agreed.minutes_are_over || is_last || is_best) {
    const bool saved = save(step, data, is_best, is_last ? Failure::kEndsTraining : Failure::kIsWarned);
    if (!saved && is_best) least_loss_ = least_before_;
  }
  if (is_last) end_save(Failure::kEndsTraining);
  if (agreed.signal == 0 || step == steps) return false;
  if (rank_ == 0) {
    const char* const name = ::sigabbrev_np(agreed.signal);
    std::printf("SIG%s: training ends after step %lld of %lld\n", name ? name : "?", static_cast<long long>(step),
                static_cast<long long>(steps));
    std::fflush(stdout);
  }
  return true;
}

TrainingCheckpoints::Agreed TrainingCheckpoints::agree() const {
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - last_save_;
  const bool is_over = config_.every_minutes > 0 && since.count() >= 60 * config_.every_minutes;
  auto own = static_cast<unsigned char>(StopSignals::received());
  if (rank_ == 0 && is_over) own |= kMinutesAreOver;
  if (EngineCheckpoints(engine_).save_has_ended()) own |= kSaveHasEnded;
  std::vector<unsigned char> all(static_cast<std::size_t>(ranks_->size()));
  throw_if_error(ranks_->all_gather("checkpoint due", &own, all.data(), 1).wait());
  Agreed agreed;
  agreed.save_has_ended = true;
  for (const unsigned char each : all) {
    if (each & kMinutesAreOver) agreed.minutes_are_over = true;
    if (!(each & kSaveHasEnded)) agreed.save_has_ended = false;
    if (agreed.signal == 0) agreed.signal = each & kSignal;
  }
  return agreed;
}

CheckpointItems TrainingCheckpoints::items(const SamplerCursor& data) const {
  CheckpointItems items;
  items.json["model"] = model_;
  if (least_loss_) items.json[kLeastLoss] = nlohmann::json(*least_loss_).dump();
  items.data = data;
  return items;
}

bool TrainingCheckpoints::save(std::int64_t step, const SamplerCursor& data, bool is_best, Failure failure) {
  const auto start = std::chrono::steady_clock::now();
  end_save(Failure::kIsWarned);
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const bool saved = attempt(step, failure, [&] {
    const std::string path =
        save_checkpoint(engine_, config_.dir, items(data), {.keep = config_.keep, .is_best = is_best});
    if (checkpoint_progress(engine_)) {
      under_way_ = UnderWay{step, path, seconds(), 0, is_best};
      return;
    }
    failed_ = 0;
    if (rank_ != 0 || path.empty()) return;  // a replay saves no checkpoint
    std::printf("checkpoint after step %lld: %s (%.3f s)\n", static_cast<long long>(step), path.c_str(), seconds());
    std::fflush(stdout);
  });
  last_save_ = std::chrono::steady_clock::now();
  return saved;
}

template <class Body>
bool TrainingCheckpoints::attempt(std::int64_t step, Failure failure, const Body& body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    engine_.check();  // throws if a rank is lost: that is not a failed save
    if (failure == Failure::kEndsTraining || failed_ >= config_.failures) throw;
    ++failed_;
    if (rank_ == 0) {
      log_warning("no checkpoint after step " + std::to_string(step) + ": " + error.message() +
                  ". Training goes on: checkpoint.failures allows " + std::to_string(config_.failures) +
                  " in a row, and this is number " + std::to_string(failed_));
    }
    return false;
  }
}

void TrainingCheckpoints::report_progress() {
  if (!under_way_ || rank_ != 0) return;
  const std::optional<CheckpointProgress> progress = checkpoint_progress(engine_);
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - last_save_;
  if (!progress || since.count() < under_way_->next_report_s) return;
  under_way_->next_report_s = since.count() + 1;
  std::printf("checkpoint after step %lld: %.0f %% written\n", static_cast<long long>(under_way_->step),
              100.0 * static_cast<double>(progress->written) / static_cast<double>(progress->bytes));
  std::fflush(stdout);
}

void TrainingCheckpoints::end_save(Failure failure) {
  if (!under_way_) return;
  const UnderWay ended = *std::exchange(under_way_, std::nullopt);
  const bool saved = attempt(ended.step, failure, [&] {
    finish_checkpoint(engine_);
    failed_ = 0;
    if (rank_ != 0) return;
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - last_save_;
    std::printf("checkpoint after step %lld: %s (training waited %.3f s, then %.3f s beside it)\n",
                static_cast<long long>(ended.step), ended.path.c_str(), ended.waited_s, since.count());
    std::fflush(stdout);
  });
  if (!saved && ended.is_best) least_loss_ = least_before_;
}

}  // namespace tessera::app
