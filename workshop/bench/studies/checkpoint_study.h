#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/mesh.h"
#include "workshop/bench/bench_table.h"

namespace tessera::app {

struct CheckpointStudyOptions {
  std::filesystem::path folder;          ///< the study makes a folder in it, and removes it
  std::int64_t parameters = 64'000'000;  ///< approximate number, with AdamW: 12 bytes each in a checkpoint
  int rounds = 5;
};

/// Measures a save and a load of a checkpoint, and the time that this machine needs for the same number of bytes: a
/// copy in memory, and a plain file that is written and synced, by all ranks at once. A save beside training
/// ("checkpoint.async") is timed twice: the time for which training waits, and the time until it is committed while
/// nothing else runs. A commit ("durable") is compared with a file of as many bytes that is overwritten past the page
/// cache. All these measurements take turns in each round; the checkpoint is in the page cache when it is loaded. It is
/// collective, and the figures are those of rank 0.
BenchTable study_checkpoints(const Mesh& mesh, const CheckpointStudyOptions& options);

}  // namespace tessera::app
