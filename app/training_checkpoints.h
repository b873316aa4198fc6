#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "app/commands.h"
#include "models/model_config.h"
#include "tessera/checkpoint.h"
#include "tessera/engine.h"
#include "tessera/mesh.h"
#include "tessera/token_batches.h"

namespace tessera {
class Collectives;
}

namespace tessera::app {

/// The checkpoint with which a run begins, by --checkpoint-dir and --resume; empty: none.
///
/// | --resume | begins with                                                                |
/// |----------|----------------------------------------------------------------------------|
/// | auto     | the latest one in --checkpoint-dir; from the start where there is none      |
/// | none     | the start                                                                  |
/// | PATH     | that checkpoint, or the latest one of that folder                           |
///
/// Errors: 66 and 65 where PATH is none, and where --checkpoint-dir has checkpoints but `latest` is damaged; 64 for options that need
/// --checkpoint-dir.
absl::StatusOr<std::string> checkpoint_to_resume(const CheckpointOptions& options);

/// While it lives, SIGTERM and SIGUSR1 ask for an end after the step under way. A second one ends the process at once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  /// The signal that came, or 0.
  static int received();
};

/// The checkpoints of a training run: when they are made, and that all ranks agree when.
///
/// A checkpoint is made every --every-steps steps, every --every-minutes minutes by rank 0's clock, when a signal asks for the end, and
/// after the last step; with --keep-best also when held-out data had their least loss so far. Ranks agree with an all-gather of one byte a step. Without --checkpoint-dir nothing happens, and signals do what
/// they do without this.
class TrainingCheckpoints {
 public:
  /// Collective, if there is a folder. Throws tessera::Error.
  TrainingCheckpoints(const CheckpointOptions& options, const models::ModelConfig& model, const Mesh& mesh);
  ~TrainingCheckpoints();

  /// Loads `path`, unless it is empty, and lets `batches` go on behind it. Returns the steps that are done. Collective.
  std::int64_t resume(const std::string& path, Engine& engine, TokenBatches& batches);

  /// After step number `step` of `steps`: saves if it is time. `data`: behind the step's last microbatch. `held_out`: the loss on
  /// held-out data after this step, the same on every rank, if it was measured. True: training ends here, since a signal came.
  /// Collective; throws tessera::Error where a checkpoint cannot be written.
  bool after_step(std::int64_t step, std::int64_t steps, Engine& engine, const SamplerCursor& data,
                  std::optional<double> held_out);

 private:
  void save(std::int64_t step, Engine& engine, const SamplerCursor& data, bool is_best);
  void take_best(const CheckpointItems& items);
  struct Agreed {
    int signal = 0;
    bool minutes_are_over = false;
  };
  Agreed agree() const;
  /// A save that goes on beside training (checkpoint.async).
  struct UnderWay {
    std::int64_t step = 0;
    std::string path;
    double waited_s = 0;       ///< that training waited for
    double next_report_s = 0;  ///< after that
  };
  /// Rank 0 prints how far it is, once a second, and when it has ended.
  void report_end(Engine& engine);

  const CheckpointOptions& options_;
  const std::string model_;  ///< JSON
  const int rank_;
  std::optional<StopSignals> signals_;
  std::shared_ptr<Collectives> ranks_;
  std::chrono::steady_clock::time_point last_save_;
  std::optional<UnderWay> under_way_;
  std::optional<double> least_loss_;  ///< on held-out data, of this run and those that it goes on from
};

}  // namespace tessera::app
