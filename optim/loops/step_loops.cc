#include "optim/loops/step_loops.h"

namespace tessera {

const StepLoops& step_loops(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx2) return kAvx2StepLoops;
  if (set == InstructionSet::kAvx512) return kAvx512StepLoops;
#endif
  return kPortableStepLoops;
}

}  // namespace tessera
