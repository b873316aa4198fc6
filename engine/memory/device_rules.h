#pragma once

#include "tessera/strategy.h"

namespace tessera {

/// Throws tessera::Error (78) if the strategy wants something that does not exist for the device that trains, which is
/// a GPU or the CPU. The error names the key and says what to do. make_plan calls it first.
void expect_built_for_device(const Strategy& strategy, bool is_gpu);

}  // namespace tessera
