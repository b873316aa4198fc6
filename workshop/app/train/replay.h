#pragma once

#include "tessera/strategy.h"
#include "workshop/app/commands.h"

namespace tessera::app {

/// Returns the strategy for a run whose steps are repeated. This run saves and commits nothing. The strategy keeps the
/// folder for roll-backs, since spikes may occur again, but nothing is written there. `run_train` calls this function
/// for TrainCommand::replays.
Strategy without_outputs(Strategy strategy);

/// Returns the run's command without its checkpoints, outputs, predictions, evaluations and samples.
TrainCommand without_outputs(TrainCommand run);

}  // namespace tessera::app
