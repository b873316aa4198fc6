#pragma once

#include <absl/status/statusor.h>

#include <functional>

#include "runtime/comm/resolve_topology.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera {

/// Does the work that all functions tessera::init have in common. It finds out which rank this process is, and calls
/// `make` to join the job. Within tessera::run it ensures that the end of this rank is reported. It also raises this
/// process's limit of file descriptors (process_limits.h). Throws tessera::Error: the error of `make`; 71 if the system
/// allows too few threads.
Mesh join_job(const std::function<absl::StatusOr<Mesh>(const Topology&)>& make,
              const Environment& environment = process_environment);

/// Does the work of tessera::init for callers that know more about their process than the environment says. One such
/// caller is torch.distributed in Python.
Mesh init_in(const Strategy& strategy, const Environment& environment);

}  // namespace tessera
