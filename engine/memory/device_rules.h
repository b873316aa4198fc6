#pragma once

#include "tessera/strategy.h"

namespace tessera {

/// Throws tessera::Error (78), which names the key and what to do, where the strategy wants what is not built for the device that trains:
/// a GPU, or the CPU, whose memory is the host's.
void expect_built_for_device(const Strategy& strategy, bool is_gpu);

}  // namespace tessera
