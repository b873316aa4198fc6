#pragma once

#include "tessera/strategy.h"

namespace tessera {

/// Throws tessera::Error (78) where the strategy wants something that is not built for the device that trains: a GPU,
/// or the CPU, whose memory is the host's. The error names the key and says what to do. make_plan calls it first.
void expect_built_for_device(const Strategy& strategy, bool is_gpu);

}  // namespace tessera
