#pragma once

#include <optional>

#include "tessera/checkpoint.h"
#include "tessera/engine.h"
#include "tessera/strategy.h"
#include "tessera/token_batches.h"
#include "workshop/app/commands.h"

namespace tessera::app {

/// Returns whether a run with this "durable" was begun before, and --resume lets it continue. The run continues from
/// its last commit, or from the start if it ended before its first commit.
bool goes_on_durably(const Strategy& strategy, const CheckpointOptions& options, int rank);

/// Continues from the last commit, if there is one and --resume is auto. `batches` then continues after that commit.
/// The call is collective. Throws tessera::Error: 64 if there is a commit, and --resume is not auto.
std::optional<LoadedCheckpoint> resume_durable_steps(const CheckpointOptions& options, Engine& engine,
                                                     TokenBatches& batches, bool speaks);

/// This is called after each step. `items.data`: the cursor after the step's last microbatch. `is_last`: this run makes
/// no more steps. It is collective. Throws tessera::Error.
void commit_durable_step(Engine& engine, const CheckpointItems& items, bool is_last);

}  // namespace tessera::app
