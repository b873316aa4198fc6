#pragma once

#include "optim/arithmetic/outer_rule.h"

namespace tessera {

/// Makes one pass of an outer step over memory of the host. OuterSteps calls it through the place where masters lie; a
/// GPU's is DeviceKernels::outer_pass, which gives the same bits.
void outer_pass(const OuterRun& run);

}  // namespace tessera
