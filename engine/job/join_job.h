#pragma once

#include <absl/status/statusor.h>

#include <functional>

#include "runtime/comm/resolve_topology.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera {

/// What every init does: finds this process's place among the ranks, has `make` join them, and within tessera::run sees to it that this
/// rank's end is reported. Raises this process's limit of descriptors (process_limits.h). Throws tessera::Error: 71 where
/// the system has too few threads.
Mesh join_job(const std::function<absl::StatusOr<Mesh>(const Topology&)>& make,
              const Environment& environment = process_environment);

/// tessera::init where more than the environment says who this process is: Python has torch.distributed.
Mesh init_in(const Strategy& strategy, const Environment& environment);

}  // namespace tessera
