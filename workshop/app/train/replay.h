#pragma once

#include "tessera/strategy.h"

namespace tessera::app {

/// The strategy of a run whose steps are made again: it saves and commits nothing. A folder to roll back from stays,
/// since a spike is a spike again; nothing is written there. `run_train` calls it for TrainCommand::replays.
Strategy without_outputs(Strategy strategy);

}  // namespace tessera::app
