#pragma once

#include <absl/status/status.h>

#include <functional>

#include "tessera/mesh.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/commands.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

// These functions are for a run of `tessera train` that plays an order ("sync": "play_order").

/// Calls `train` with the rank of this process, and returns its exit code. A process that no launcher has started plays
/// an order of several ranks alone, if these ranks own the shards. It calls `train` on a thread for each of these
/// ranks, and returns rank 0's exit code. Throws tessera::Error as read_order_head does for the file, and the
/// exceptions of `train`.
int on_ranks_of_this_process(const Strategy& strategy, const Mesh& of_process,
                             const std::function<int(const Mesh&)>& train);

/// Returns the error (64) of a run whose ranks are threads, if these ranks would not be independent of each other:
/// dropout draws from a generator that all of them share, and a process has only one set of signal handlers and of
/// locks for checkpoints.
absl::Status check_played(const models::ModelConfig& model, const Strategy& strategy, const Topology& topology);

/// Returns the command with the steps of this rank. A run that plays an order of `tessera simulate --order` makes as
/// many steps on each rank as the order has for it. Other runs make --steps steps. Throws tessera::Error: 64 if --steps
/// is below the most steps of a rank, or if ranks were to meet between two of these steps. Errors of the file are those
/// of read_order_head.
TrainCommand with_own_steps(TrainCommand command, const Strategy& strategy, int rank);

}  // namespace tessera::app
