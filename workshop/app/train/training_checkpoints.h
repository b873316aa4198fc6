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

/// Returns the path of the checkpoint that a run begins with, by its folder (--checkpoint-dir, or checkpoint.dir) and
/// --resume; empty: none.
///
/// | --resume | begins with                                                                |
/// |----------|----------------------------------------------------------------------------|
/// | auto     | the latest one in the folder; from the start where there is none; a commit    |
/// |          | ("durable") that is later comes first                                       |
/// | none     | the start                                                                  |
/// | PATH     | that checkpoint, or the latest one of that folder                           |
///
/// Errors: those of find_checkpoint (66, 65) if PATH is no checkpoint, or if the folder has checkpoints but `latest` is
/// damaged; 64 for
/// options that need a folder. `config`: the strategy's settings, changed by the options.
absl::StatusOr<std::string> checkpoint_to_resume(const CheckpointOptions& options, const CheckpointConfig& config);

/// SIGTERM and SIGUSR1 ask for an end after the current step, as long as such an object lives. A second signal ends the
/// process at once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  /// Returns the signal that came, or 0.
  static int received();
};

/// The checkpoints of a training run: it decides when they are made, lets all ranks agree on that, and handles
/// failures.
///
/// A checkpoint is made every checkpoint.every_steps steps, every checkpoint.every_minutes minutes by rank 0's clock,
/// when a signal asks for the end, and after the last step. With --keep-best one is also made when held-out data had
/// their least loss so far. Up to checkpoint.failures may fail in a row, with a warning each; the last checkpoint of a
/// run must succeed. Ranks agree with an all-gather of one byte a step. With "sync" backups, where nobody waits for the
/// slowest rank in a step, they agree only every kStepsBetweenMeetings steps, and at steps where a checkpoint is due or
/// held-out data have been measured. If there is no folder nothing happens, and signals keep their usual effect.
class TrainingCheckpoints {
 public:
  /// Makes the checkpoints of a training run with `engine`, whose strategy says when. It is collective if there is a
  /// folder. Throws tessera::Error.
  TrainingCheckpoints(Engine& engine, const CheckpointOptions& options, const models::ModelConfig& model,
                      const Mesh& mesh);
  ~TrainingCheckpoints();

  /// Loads `path`, unless it is empty or no later than the commit that `committed` came from, and lets `batches` go on
  /// behind the checkpoint. Returns the steps that are done. It is collective.
  std::int64_t resume(const std::string& path, const std::optional<LoadedCheckpoint>& committed, TokenBatches& batches);

  /// Returns what a checkpoint or a commit holds in addition to training state. `data`: the cursor behind the last
  /// microbatch.
  CheckpointItems items(const SamplerCursor& data) const;

  /// How far a run is: the steps that are done, the steps that were done before the last result, and all steps.
  struct Place {
    std::int64_t before = 0, step = 0, steps = 0;
  };
  /// This is called after each step, and saves if it is time. `data`: the cursor behind the step's last microbatch.
  /// `held_out`: the loss on held-out data after this step, the same on every rank, if it was measured. Returns true if
  /// training ends here, since a signal came. It is collective. Throws tessera::Error if a checkpoint cannot be
  /// written, and training must therefore end.
  bool after_step(const Place& at, const SamplerCursor& data, std::optional<double> held_out);

 private:
  enum class Failure : std::uint8_t { kIsWarned, kEndsTraining };
  /// Saves a checkpoint. Returns false if it failed, and training goes on.
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
  /// Prints on rank 0 how far the save is, once a second.
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
  std::optional<double> least_loss_;    ///< the least on held-out data, in this run and the runs before it
  std::optional<double> least_before_;  ///< the least loss before the last checkpoint that was the best
  std::int64_t failed_ = 0;             ///< number of failed saves in a row
};

}  // namespace tessera::app
