#pragma once

#include "tessera/strategy.h"

namespace tessera::app {

/// Returns the strategy for a run whose steps are repeated. This run saves and commits nothing. The strategy keeps the
/// folder for roll-backs, since spikes may occur again, but nothing is written there. `run_train` calls this function
/// for TrainCommand::replays.
Strategy without_outputs(Strategy strategy);

}  // namespace tessera::app
