#pragma once

#include <absl/status/statusor.h>

#include <functional>

#include "tessera/mesh.h"

namespace tessera {

/// What every init does: finds this process's place among the ranks, has `make` join them, and within tessera::run sees to it that this
/// rank's end is reported. Throws tessera::Error.
Mesh join_job(const std::function<absl::StatusOr<Mesh>(const Topology&)>& make);

}  // namespace tessera
