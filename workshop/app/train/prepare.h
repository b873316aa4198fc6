#pragma once

// See docs/glossary.md: agreement.

#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_folder.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"
#include "tessera/token_batches.h"
#include "workshop/app/commands.h"
#include "workshop/app/text/text_tokenizer.h"
#include "workshop/app/train/evaluation.h"
#include "workshop/app/train/run_outputs.h"
#include "workshop/models/language_model.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

/// Everything that a run consists of, before any parameter has memory.
struct Prepared {
  models::ModelConfig config;
  std::shared_ptr<models::LanguageModel> model;  ///< deferred
  std::optional<TokenBatches> batches;
  std::optional<Evaluation> evaluation;
  ChosenTokenizer tokenizer;  ///< this is set if the data is text
  RunOutputs outputs;
  std::string resumes;  ///< path of the checkpoint from which the run continues; empty: none
  FolderLock lock;      ///< rank 0's lock on the folder for checkpoints
  std::int64_t seq_len = 0;
};

/// Returns the path from which the model is read.
const std::string& model_of(const TrainCommand& command);

/// Returns the strategy with record_hashes.file in the run directory, and with the options for checkpoints. The options
/// take precedence over the strategy file. A replay writes neither hashes nor checkpoints.
Strategy with_outputs(Strategy strategy, const TrainCommand& command);

/// Returns the microbatches of a step on all ranks.
std::int64_t microbatches_of_step(const Strategy& strategy, int ranks);

/// Sets the number of microbatches of a step that --global-batch needs on `ranks` ranks. Throws tessera::Error (78) if
/// there is no such number.
Strategy with_global_batch(Strategy strategy, const TrainCommand& command, int ranks);

/// Prepares everything in a run that may fail on one rank only. `tessera train` calls this function before ranks agree
/// (agreement.h).
absl::StatusOr<Prepared> prepare(const TrainCommand& command, const Strategy& strategy, const Mesh& mesh);

/// Returns everything that must be the same on every rank.
nlohmann::json description(const TrainCommand& command, const Strategy& strategy, const Prepared& run);

}  // namespace tessera::app
