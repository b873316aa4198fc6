#pragma once

#include "tessera/strategy.h"

namespace tessera::app {

/// Returns the strategy of a run whose steps are made again: it saves and commits nothing. A folder for roll-backs
/// stays, since spikes come again; nothing is written there. `run_train` calls it for TrainCommand::replays.
Strategy without_outputs(Strategy strategy);

}  // namespace tessera::app
