#pragma once

#include <absl/status/status.h>

#include <filesystem>
#include <string>

#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/commands.h"
#include "workshop/app/output_files.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

/// The files that `tessera train` writes, and where they are. Only rank 0 writes them.
///
/// `--out DIR` is a run directory: DIR/config.json (what was run), DIR/metrics.jsonl, DIR/weights.pt. The options for
/// single files may be given too. A relative path then lies in DIR, if --out is given.
struct RunOutputs {
  std::filesystem::path config, metrics, trace, weights;  ///< empty: not written
  std::filesystem::path profile, operators;               ///< empty: not written
  std::filesystem::path hf;                               ///< folder for a model of Hugging Face; empty: not written
  Existing existing = Existing::kKept;
  bool is_restart = false;            ///< the job continues, and its metrics continue where they stopped
  std::string run_id;                 ///< "20261122-082250-9f3c": no two runs have the same id
  std::filesystem::path events = {};  ///< event file of TensorBoard; empty: not written
};

/// Returns the outputs of a command. Existing files are replaced with `--overwrite`, by a job that torchrun or Slurm
/// starts again (`restart_count`), and by a job that continues from a checkpoint (`resumes`).
RunOutputs outputs_of(const TrainCommand& command, int restart_count, bool resumes = false);

/// Checks the outputs before the first step, while nothing is written yet (check_outputs).
absl::Status check_outputs(const TrainCommand& command, const RunOutputs& outputs);

/// Writes config.json: run id, version, start time, ranks, command line, and strategy and model with all their keys.
absl::Status write_config(const RunOutputs& outputs, const TrainCommand& command, const Strategy& strategy,
                          const models::ModelConfig& model, const Topology& topology);

/// Returns the present time, such as "2026-11-22T08:22:50Z".
std::string utc_now();

}  // namespace tessera::app
