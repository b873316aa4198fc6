#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/strategy.h"
#include "workshop/app/commands.h"
#include "workshop/launch/launcher.h"

namespace tessera::app {

/// Returns the strategy for a run whose steps are repeated. This run saves and commits nothing. The strategy keeps the
/// folder for roll-backs, since spikes may occur again, but nothing is written there. `run_train` calls this function
/// for TrainCommand::replays.
Strategy without_outputs(Strategy strategy);

/// Returns the run's command without its checkpoints, outputs, predictions, evaluations and samples. The command may go
/// on with another processor if the run may.
TrainCommand without_outputs(TrainCommand run);

/// Lets this process and those that it starts compute with `threads` threads each, unless the caller has set a number.
/// LibTorch's operators may give other bits with another number. If `threads` is 0, the number is unknown, and nothing
/// is set.
void keep_threads(std::int64_t threads);

/// Starts this program once more with the arguments `words`, on the ranks that `launching` describes, and returns its
/// exit code.
int launch_again(LaunchOptions launching, const std::vector<std::string>& words);

}  // namespace tessera::app
