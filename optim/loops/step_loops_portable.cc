// This file has the loops for any processor; see the flags in CMakeLists.txt.

#include "optim/loops/step_kernel.h"

namespace tessera {

const StepLoops kPortableStepLoops = kStepLoops<Simd<4>>;

}  // namespace tessera
