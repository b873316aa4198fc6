#pragma once

#include "optim/arithmetic/outer_rule.h"

namespace tessera {

/// Makes one pass of an outer step over memory of the host. OuterSteps calls it through the place where masters lie. On
/// a GPU, DeviceKernels::outer_pass does the same, to the same bits.
void outer_pass(const OuterRun& run);

}  // namespace tessera
