#pragma once

#include <absl/status/status.h>

#include "benchmarks/native/samples.h"
#include "runtime/comm/collectives.h"

namespace tessera {

/// Each sample becomes the slowest rank's. Collective; every rank has as many.
absl::Status take_slowest(Collectives& group, Samples& samples);

}  // namespace tessera
