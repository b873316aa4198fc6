#include "engine/device/accelerator.h"
#include "runtime/border/throw.h"

namespace tessera {

Accelerator cuda_accelerator(int) {
  throw Error(ExitCode::kUnavailable,
              "training on a GPU needs kernels, and this Tessera was built without CUDA's compiler. [T0098] hint: "
              "configure with TESSERA_CUDA=ON where nvcc is installed");
}

}  // namespace tessera
