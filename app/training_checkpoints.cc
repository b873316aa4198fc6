#include "app/training_checkpoints.h"

#include <signal.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"

namespace tessera::app {
namespace {

constexpr int kStopping[] = {SIGTERM, SIGUSR1};
/// The item of a checkpoint that holds the least loss on held-out data so far.
constexpr const char* kLeastLoss = "least_loss";

std::atomic<int> received_signal{0};

void note_signal(int signal) { received_signal.store(signal, std::memory_order_relaxed); }

/// What a rank tells the others after a step.
constexpr unsigned char kMinutesAreOver = 0x80;  // the other bits: a signal's number

}  // namespace

absl::StatusOr<std::string> checkpoint_to_resume(const CheckpointOptions& options) {
  const auto refuse = [](const std::string& what) { return make_error(ExitCode::kUsage, "train: " + what); };
  const bool has_folder = !options.folder.empty();
  if (!has_folder && (options.every_steps > 0 || options.every_minutes > 0 || options.keep > 0 || options.keep_best ||
                      options.signal_exit_code > 0))
    return refuse(
        "--every-steps, --every-minutes, --keep, --keep-best and --signal-exit-code want --checkpoint-dir, the folder "
        "for checkpoints");
  if (options.resume == "none" || (!has_folder && options.resume == "auto")) return "";
  if (options.resume != "auto") return find_checkpoint(options.resume, "--resume");
  std::error_code error;
  if (!std::filesystem::exists(options.folder, error) && !error) return "";
  TESSERA_ASSIGN_OR_RETURN(const auto there, list_checkpoints(options.folder, "--checkpoint-dir"));
  if (there.empty()) return "";
  return find_checkpoint(options.folder, "--checkpoint-dir");
}

StopSignals::StopSignals() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);  // the next one does what it does by itself
  for (const int signal : kStopping) ::sigaction(signal, &action, nullptr);
}

StopSignals::~StopSignals() {
  for (const int signal : kStopping) ::signal(signal, SIG_DFL);
}

int StopSignals::received() { return received_signal.load(std::memory_order_relaxed); }

TrainingCheckpoints::TrainingCheckpoints(const CheckpointOptions& options, const models::ModelConfig& model,
                                         const Mesh& mesh)
    : options_(options),
      model_(models::to_json(model)),
      rank_(mesh.rank()),
      last_save_(std::chrono::steady_clock::now()) {
  if (options_.folder.empty()) return;
  signals_.emplace();
  ranks_ = value_or_throw(groups_of(mesh).world("training_checkpoints"));
}

TrainingCheckpoints::~TrainingCheckpoints() = default;

std::int64_t TrainingCheckpoints::resume(const std::string& path, Engine& engine, TokenBatches& batches) {
  if (path.empty()) return 0;
  const auto start = std::chrono::steady_clock::now();
  const LoadedCheckpoint loaded = load_checkpoint(engine, path);
  if (!loaded.items.data)
    throw Error(ExitCode::kCorruptData,
                path +
                    " does not say where its data goes on. hint: it was saved by another program; "
                    "load it there");
  batches.resume(*loaded.items.data);
  take_best(loaded.items);
  if (rank_ == 0) {
    std::printf("resumes %s after step %lld (%.3f s)\n", loaded.path.c_str(), static_cast<long long>(loaded.step),
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  return loaded.step;
}

/// A checkpoint of a program that measured nothing has no such item.
void TrainingCheckpoints::take_best(const CheckpointItems& items) {
  const auto item = items.json.find(kLeastLoss);
  if (item == items.json.end()) return;
  const nlohmann::json loss = nlohmann::json::parse(item->second, nullptr, /*allow_exceptions=*/false);
  if (!loss.is_number())
    throw Error(ExitCode::kCorruptData, std::string("the checkpoint's item ") + kLeastLoss + " is no number");
  least_loss_ = loss.get<double>();
}

bool TrainingCheckpoints::after_step(std::int64_t step, std::int64_t steps, Engine& engine, const SamplerCursor& data,
                                     std::optional<double> held_out) {
  if (!ranks_) return false;
  report_end(engine);
  const Agreed agreed = agree();
  const bool is_regular = options_.every_steps > 0 && step % options_.every_steps == 0;
  const bool is_last = agreed.signal != 0 || step == steps;
  // A loss that is NaN is no less than any other.
  const bool is_less = held_out && (!least_loss_ || *held_out < *least_loss_) && *held_out == *held_out;
  if (is_less) least_loss_ = held_out;
  const bool is_best = is_less && options_.keep_best;
  if (is_regular || agreed.minutes_are_over || is_last || is_best) save(step, engine, data, is_best);
  if (is_last) {
    finish_checkpoint(engine);
    report_end(engine);
  }
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
  const bool is_over = options_.every_minutes > 0 && since.count() >= 60 * options_.every_minutes;
  auto own = static_cast<unsigned char>(StopSignals::received());
  if (rank_ == 0 && is_over) own |= kMinutesAreOver;
  std::vector<unsigned char> all(static_cast<std::size_t>(ranks_->size()));
  throw_if_error(ranks_->all_gather("checkpoint due", &own, all.data(), 1).wait());
  Agreed agreed;
  for (const unsigned char each : all) {
    if (each & kMinutesAreOver) agreed.minutes_are_over = true;
    if (agreed.signal == 0) agreed.signal = each & ~kMinutesAreOver;
  }
  return agreed;
}

void TrainingCheckpoints::save(std::int64_t step, Engine& engine, const SamplerCursor& data, bool is_best) {
  const auto start = std::chrono::steady_clock::now();
  CheckpointItems items;
  items.json["model"] = model_;
  if (least_loss_) items.json[kLeastLoss] = nlohmann::json(*least_loss_).dump();
  items.data = data;
  if (checkpoint_progress(engine)) {
    finish_checkpoint(engine);
    report_end(engine);
  }
  const std::string path = save_checkpoint(engine, options_.folder, items, {.keep = options_.keep, .is_best = is_best});
  last_save_ = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(last_save_ - start).count();
  if (checkpoint_progress(engine)) {
    under_way_ = UnderWay{step, path, seconds, 0};
  } else if (rank_ == 0) {
    std::printf("checkpoint after step %lld: %s (%.3f s)\n", static_cast<long long>(step), path.c_str(), seconds);
    std::fflush(stdout);
  }
}

void TrainingCheckpoints::report_end(Engine& engine) {
  if (!under_way_) return;
  const std::optional<CheckpointProgress> progress = checkpoint_progress(engine);
  if (rank_ == 0) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - last_save_;
    if (progress && since.count() >= under_way_->next_report_s) {
      under_way_->next_report_s = since.count() + 1;
      std::printf("checkpoint after step %lld: %.0f %% written\n", static_cast<long long>(under_way_->step),
                  100.0 * static_cast<double>(progress->written) / static_cast<double>(progress->bytes));
    } else if (!progress) {
      std::printf("checkpoint after step %lld: %s (training waited %.3f s, then %.3f s beside it)\n",
                  static_cast<long long>(under_way_->step), under_way_->path.c_str(), under_way_->waited_s,
                  since.count());
    }
    std::fflush(stdout);
  }
  if (!progress) under_way_.reset();
}

}  // namespace tessera::app
