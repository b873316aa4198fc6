#pragma once

#include <absl/status/statusor.h>

#include <functional>

#include "runtime/comm/resolve_topology.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera {

/// Does what every tessera::init does: finds out which rank this process is, calls `make` to join the job, and within
/// tessera::run sees to it that this rank's end is reported. It also raises this process's limit of file descriptors
/// (process_limits.h). Throws tessera::Error: the error of `make`, and 71 where the system has too few threads.
Mesh join_job(const std::function<absl::StatusOr<Mesh>(const Topology&)>& make,
              const Environment& environment = process_environment);

/// tessera::init for callers whose process is described by more than the environment: Python has torch.distributed.
Mesh init_in(const Strategy& strategy, const Environment& environment);

}  // namespace tessera
