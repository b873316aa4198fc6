// This file has the loops for x86-64-v4; see the flags in CMakeLists.txt.

#include "optim/loops/step_kernel.h"

namespace tessera {

const StepLoops kAvx512StepLoops = kStepLoops<Simd<16>>;

}  // namespace tessera
