#pragma once

#include "optim/arithmetic/outer_rule.h"

namespace tessera {

/// Makes one pass of an outer step over memory of the host. OuterSteps calls it through OuterPlace
/// (engine/step/outer_place.h). On a GPU, DeviceKernels::outer_pass does the same, with the same bits.
void outer_pass(const OuterRun& run);

}  // namespace tessera
