#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tessera/checkpoint.h"
#include "tessera/engine.h"
#include "tessera/mesh.h"
#include "tessera/token_batches.h"
#include "workshop/app/commands.h"
#include "workshop/models/model_config.h"

namespace tessera {
class Collectives;
}

namespace tessera::app {

/// Returns the path of the checkpoint with which a run begins; empty if there is none. The path follows from the folder
/// (--checkpoint-dir, or checkpoint.dir) and --resume.
///
/// | --resume | begins with                                                                |
/// |----------|----------------------------------------------------------------------------|
/// | auto     | the latest checkpoint in the folder, or the start if there is none; a commit  |
/// |          | ("durable") that is later is used instead                                   |
/// | none     | the start                                                                  |
/// | PATH     | this checkpoint, or the latest checkpoint of this folder                    |
///
/// Errors: those of find_checkpoint (66, 65) if PATH is no checkpoint, or if the folder has checkpoints but `latest` is
/// damaged; 65 if the folder has only damaged checkpoints; 64 if an option needs a folder and there is none; 73 if the
/// folder is a file. `config` has the strategy's settings, changed by the options.
absl::StatusOr<std::string> checkpoint_to_resume(const CheckpointOptions& options, const CheckpointConfig& config);

/// While such an object exists, SIGTERM and SIGUSR1 ask for an end after the current step. If the same signal arrives
/// again, it ends the process at once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  /// Returns the signal that arrived, or 0.
  static int received();
};

/// Makes the checkpoints of a training run. It decides when they are made, makes all ranks agree on this decision, and
/// handles failures.
///
/// A checkpoint is made every checkpoint.every_steps steps, every checkpoint.every_minutes minutes by rank 0's clock,
/// when a signal asks for the end, and after the last step. If --keep-best is given, a checkpoint is also made when the
/// loss on held-out data is the least so far. Up to checkpoint.failures saves in a row may fail, with a warning each.
/// The last checkpoint of a run must succeed. Ranks agree with an all-gather of one byte in each step. If "sync" is
/// backups, no rank waits for the slowest rank in a step. Ranks then agree only every kStepsBetweenMeetings steps, at
/// steps where a checkpoint is due, after a measurement on held-out data, and after the last step. If there is no
/// folder, nothing happens, and signals keep their usual effect.
class TrainingCheckpoints {
 public:
  /// Makes the checkpoints of a training run with `engine`. The engine's strategy says when they are made. The call is
  /// collective if there is a folder. Throws tessera::Error.
  TrainingCheckpoints(Engine& engine, const CheckpointOptions& options, const models::ModelConfig& model,
                      const Mesh& mesh);
  ~TrainingCheckpoints();

  /// Loads `path`, unless it is empty or no later than the commit `committed`. `batches` then continues after the
  /// checkpoint. Returns the number of steps that are done. The call is collective.
  std::int64_t resume(const std::string& path, const std::optional<LoadedCheckpoint>& committed, TokenBatches& batches);

  /// Returns the content of a checkpoint or a commit that is not training state. `data` is the cursor after the last
  /// microbatch.
  CheckpointItems items(const SamplerCursor& data) const;

  /// The progress of a run: the number of steps that are done, the number that were done before the last result, and
  /// the number of all steps.
  struct Place {
    std::int64_t before = 0, step = 0, steps = 0;
  };
  /// The training loop calls this function after each step. The function saves a checkpoint if one is due. `data` is
  /// the cursor after the step's last microbatch. `held_out` is the loss on held-out data after this step, the same on
  /// every rank, if it was measured. Returns true if training ends here because of a signal. The call is collective.
  /// Throws tessera::Error if a checkpoint cannot be written and training must therefore end.
  bool after_step(const Place& at, const SamplerCursor& data, std::optional<double> held_out);

 private:
  enum class Failure : std::uint8_t { kIsWarned, kEndsTraining };
  /// Saves a checkpoint. Returns false if the save failed and training continues.
  bool save(std::int64_t step, const SamplerCursor& data, bool is_best, Failure failure);
  /// Runs `body`, which saves the checkpoint of `step` or ends its save. Returns false if that failed.
  template <class Body>
  bool attempt(std::int64_t step, Failure failure, const Body& body);
  void take_best(const CheckpointItems& items);
  static constexpr std::int64_t kStepsBetweenMeetings = 10;
  bool ranks_meet(const Place& at, bool has_measured) const;
  struct Agreed {
    int signal = 0;
    bool minutes_are_over = false;
    bool save_has_ended = false;  ///< the save has ended on all ranks
  };
  Agreed agree() const;
  /// A save that runs while training continues (checkpoint.async).
  struct UnderWay {
    std::int64_t step = 0;
    std::string path;
    double waited_s = 0;       ///< seconds that training waited for the save
    double next_report_s = 0;  ///< time of the next report of progress, in seconds after last_save_
    bool is_best = false;
  };
  /// Prints the progress of the save on rank 0, at most once per second.
  void report_progress();
  /// Waits for the save that is under way, if there is one.
  void end_save(Failure failure);

  Engine& engine_;
  const CheckpointConfig& config_;
  const bool keeps_best_;
  const std::string model_;  ///< the model as JSON text
  const int rank_;
  std::optional<StopSignals> signals_;
  std::shared_ptr<Collectives> ranks_;
  std::chrono::steady_clock::time_point last_save_;
  std::optional<UnderWay> under_way_;
  std::optional<double> least_loss_;    ///< the least loss on held-out data, in this run and the runs before it
  std::optional<double> least_before_;  ///< the value of least_loss_ before it last became less
  std::int64_t failed_ = 0;             ///< number of failed saves in a row
};

}  // namespace tessera::app
