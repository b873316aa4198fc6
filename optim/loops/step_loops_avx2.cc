// This file has the loops for x86-64-v3; see the flags in CMakeLists.txt.

#include "optim/loops/step_kernel.h"

namespace tessera {

const StepLoops kAvx2StepLoops = kStepLoops<Simd<8>>;

}  // namespace tessera
