#pragma once

#include "optim/arithmetic/outer_rule.h"

namespace tessera {

/// Makes one pass of an outer step over memory of the host. OuterSteps calls it through OuterPlace
/// (engine/step/outer_place.h). DeviceKernels::outer_pass does the same on a GPU, with the same bits.
void outer_pass(const OuterRun& run);

}  // namespace tessera
