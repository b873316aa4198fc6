// The loops for any processor; see the flags in CMakeLists.txt.

#include "optim/step_kernel.h"

namespace tessera {

const StepLoops kPortableStepLoops{adam<Simd<4>>, sgd<Simd<4>>};

}  // namespace tessera
