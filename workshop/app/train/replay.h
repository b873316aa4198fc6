#pragma once

#include "tessera/strategy.h"

namespace tessera::app {

/// Returns the strategy of a run whose steps are repeated: it saves and commits nothing. The folder for roll-backs is
/// not removed, since spikes may occur again; nothing is written there. `run_train` calls it for TrainCommand::replays.
Strategy without_outputs(Strategy strategy);

}  // namespace tessera::app
