#include "workshop/app/train/replay.h"

#include <absl/status/statusor.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/replay/replay_request.h"
#include "engine/replay/step_records.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/comm/resolve_topology.h"
#include "runtime/config/strategy_file.h"
#include "workshop/app/commands.h"
#include "workshop/app/exit_code_after.h"

// `tessera replay` finds the data that the run stored about the step: checkpoint, hashes, and the numbers of
// microbatches and threads. Then it runs the `tessera train` command of that run again, without outputs and with
// TESSERA_REPLAY set. If there are several ranks, the launcher starts this program once for each rank, with the same
// words.

namespace tessera::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFromStart = "none";

absl::Status replay_error(ExitCode code, const std::string& what) { return make_error(code, "replay: " + what); }

/// The checkpoint from which the run continues. If it has no path, the run begins at its start.
struct CheckpointBefore {
  std::string path;
  std::int64_t step = 0;
  std::int64_t microbatches = 0;  ///< microbatches of a step on all ranks; 0: unknown
  std::int64_t threads = 0;       ///< threads of a rank in the run that saved it; 0: unknown
};

/// Returns the last checkpoint in a folder whose step is before `step`. A run that went back has several checkpoints of
/// one step. The checkpoint that was committed last counts.
absl::StatusOr<std::string> last_before(const std::string& folder, std::int64_t step) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<ListedCheckpoint> there, list_checkpoints(folder, "--from"));
  const ListedCheckpoint* last = nullptr;
  for (const ListedCheckpoint& each : there)
    if (each.step < step && (!last || each.step >= last->step)) last = &each;
  if (last) return (fs::path(folder) / last->name).string();
  std::vector<std::string> names;
  for (const ListedCheckpoint& each : there) names.push_back(each.name);
  return replay_error(ExitCode::kNoInput,
                      "--from " + folder + " has no checkpoint of a step before " + std::to_string(step) +
                          "; there are: " + (names.empty() ? "none" : clipped(joined(names), 400)) +
                          ". [T0927] hint: name a later step; --from none begins where the run began");
}

/// Returns the checkpoint that --from names. If the run was started with --resume and a path, it began with the
/// checkpoint at that path, and not with fresh weights.
absl::StatusOr<std::string> path_before(const ReplayCommand& command) {
  if (command.from == kFromStart) {
    const std::string& resume = command.run.checkpoints.resume;
    if (resume == "auto" || resume == "none") return "";
    return find_checkpoint(resume, "--resume");
  }
  std::error_code ignored;
  const fs::path from = command.from;
  const bool is_named = fs::exists(from / "manifest.json", ignored) || !fs::is_directory(from, ignored);
  return is_named ? find_checkpoint(command.from, "--from") : last_before(command.from, command.step);
}

absl::StatusOr<CheckpointBefore> checkpoint_before(const ReplayCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const std::string path, path_before(command));
  if (path.empty()) return CheckpointBefore();
  const std::string option = command.from == kFromStart ? "--resume" : "--from";
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<SavedCheckpoint> checkpoint, SavedCheckpoint::open(path, option));
  const Manifest& manifest = checkpoint->manifest();
  if (manifest.step >= command.step)
    return replay_error(ExitCode::kUsage,
                        option + " " + path + " holds step " + std::to_string(manifest.step) + " already, so step " +
                            std::to_string(command.step) +
                            " cannot be made from it. [T0928] hint: name an earlier checkpoint, or the folder "
                            "with all of them");
  const nlohmann::json strategy = nlohmann::json::parse(manifest.strategy, nullptr, /*allow_exceptions=*/false);
  const auto number_at = [&](const char* pointer) {
    const nlohmann::json::json_pointer place(pointer);
    const bool says = strategy.contains(place) && strategy.at(place).is_number_integer();
    return says ? strategy.at(place).get<std::int64_t>() : 0;
  };
  const std::int64_t all = number_at("/deal/microbatches");
  return CheckpointBefore{path, manifest.step, all > 0 ? all : manifest.ranks * number_at("/gradient_accumulation"),
                          manifest.processor ? manifest.processor->threads : 0};
}

/// Returns the file of hashes: the file that the command names, or the file that the run wrote. It is empty if there is
/// no such file.
std::string hashes_of_run(const ReplayCommand& command, const Strategy& strategy) {
  if (!command.hashes.empty()) return command.hashes;
  if (strategy.record_hashes.every == 0) return "";
  const std::string path = (fs::path(command.run.outputs.folder) / strategy.record_hashes.file).string();
  std::error_code ignored;
  return fs::exists(path, ignored) ? path : "";
}

/// The steps that are repeated, and how they are repeated.
struct ReplayedRun {
  ReplayRequest request;
  TrainCommand train;
  std::int64_t threads = 0;  ///< threads of a rank in the recorded run; 0: unknown
  std::string text;          ///< a line that describes the replay
};

/// Returns the number of microbatches of a step on all ranks. The result 0 means that the file of hashes contains this
/// number.
absl::StatusOr<std::int64_t> microbatches_to_replay(const ReplayCommand& command,
                                                    const std::vector<StepRecord>& records,
                                                    const CheckpointBefore& before) {
  if (command.microbatches > 0) return command.microbatches;
  if (!records.empty()) return 0;
  const TrainCommand& run = command.run;
  if (run.global_batch > 0 && run.global_batch % run.batch == 0) return run.global_batch / run.batch;
  if (before.microbatches > 0) return before.microbatches;
  return replay_error(
      ExitCode::kUsage,
      "nothing says how many microbatches a step has over all ranks. [T0929] hint: give --microbatches, which is "
      "the run's number of ranks times gradient_accumulation");
}

/// Returns the run's own command, with which its steps up to `step` are repeated, without its outputs and measurements.
TrainCommand as_made_again(TrainCommand run, const CheckpointBefore& before, std::int64_t step) {
  run.replays = true;
  run.steps = step;
  // The number of microbatches is known, and the number of a step's samples follows from it.
  if (run.batch > 0 && run.global_batch % run.batch == 0) run.global_batch = 0;
  run = without_outputs(std::move(run));
  run.checkpoints.resume = before.path.empty() ? "none" : before.path;
  return run;
}

absl::StatusOr<ReplayedRun> replayed_run(const ReplayCommand& command) {
  if (command.step > command.run.steps)
    return replay_error(ExitCode::kUsage, "--step " + std::to_string(command.step) +
                                              ", and the run ends with --steps " + std::to_string(command.run.steps) +
                                              ". [T0930] hint: name a step that it has made");
  TESSERA_ASSIGN_OR_RETURN(const Strategy strategy, read_strategy(command.run.strategy));
  if (!strategy.reproducible)
    return replay_error(
        ExitCode::kConfig,
        command.run.strategy +
            " has not \"reproducible\": true, without which other ranks make other bits. [T0931] hint: name the "
            "strategy of a run that had it; a run without it cannot be made again");
  ReplayedRun run;
  run.request.step = command.step;
  run.request.hashes = hashes_of_run(command, strategy);
  if (command.find == "nonfinite") run.request.find = ReplayRequest::Find::kNonfinite;
  if (command.find == "divergence") run.request.find = ReplayRequest::Find::kDivergence;
  if (command.find == "divergence" && run.request.hashes.empty())
    return replay_error(
        ExitCode::kUsage,
        "--find divergence has nothing to compare with. [T0932] hint: name by --hashes the file that the run's "
        "\"record_hashes\" wrote");
  TESSERA_ASSIGN_OR_RETURN(const CheckpointBefore before, checkpoint_before(command));
  std::vector<StepRecord> records;
  if (!run.request.hashes.empty()) {
    TESSERA_ASSIGN_OR_RETURN(records, read_step_records(run.request.hashes, "replay"));
  }
  TESSERA_ASSIGN_OR_RETURN(run.request.microbatches, microbatches_to_replay(command, records, before));
  run.threads = before.threads;
  if (!records.empty()) {
    const auto next = std::ranges::lower_bound(records, command.step, {}, &StepRecord::step);
    run.threads = next == records.end() ? records.back().threads : next->threads;
  }
  run.train = as_made_again(command.run, before, command.step);
  const std::string first = std::to_string(before.step + 1), last = std::to_string(command.step);
  run.text = "replay: " + (first == last ? "step " + last + " is" : "steps " + first + " to " + last + " are") +
             " made again from " + (before.path.empty() ? "the run's start" : before.path) +
             (run.request.hashes.empty() ? "; there are no hashes to compare with"
                                         : ", and compared with " + run.request.hashes);
  return run;
}

}  // namespace

Strategy without_outputs(Strategy strategy) {
  const bool goes_back = strategy.on_spike.action == SpikeAction::kRollback;
  CheckpointConfig folder;
  if (goes_back) folder.dir = strategy.checkpoint.dir;
  strategy.checkpoint = folder;
  strategy.durable = {};
  return strategy;
}

TrainCommand without_outputs(TrainCommand run) {
  const bool allows_other_processor = run.checkpoints.allows_other_processor;
  run.checkpoints = {};
  run.checkpoints.allows_other_processor = allows_other_processor;
  run.outputs = {};
  run.predicted_by = {};
  run.evaluation = {};
  run.status.histogram_every = 0;
  run.sample.tokens = 0;
  return run;
}

void keep_threads(std::int64_t threads) {
  if (threads > 0) ::setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), /*overwrite=*/0);
}

int launch_again(LaunchOptions launching, const std::vector<std::string>& words) {
  launching.prefix = false;
  launching.command = {"/proc/self/exe"};
  launching.command.insert(launching.command.end(), words.begin(), words.end());
  return launch(launching);
}

int run_replay(const ReplayCommand& command) {
  const absl::StatusOr<ReplayedRun> run = replayed_run(command);
  if (!run.ok()) return exit_code_after(run.status());
  ::setenv("TESSERA_REPLAY", run->request.to_json().c_str(), /*overwrite=*/1);
  keep_threads(run->threads);
  const absl::StatusOr<Topology> topology = resolve_topology();  // run_train reports errors of the topology
  if (command.ranks > 1 && topology.ok() && topology->launcher == "single") {
    LaunchOptions launching;
    launching.ranks = command.ranks;
    return launch_again(std::move(launching), command.words);
  }
  if (topology.ok() && topology->rank == 0) log_info(run->text);
  return run_train(run->train);
}

}  // namespace tessera::app
