#include <c10/cuda/CUDAStream.h>

#include "optim/cuda/cuda_kernels.h"
#include "runtime/engine/accelerator.h"

namespace tessera {

Accelerator cuda_accelerator(int gpu) {
  const auto index = static_cast<c10::DeviceIndex>(gpu);
  Accelerator accelerator;
  accelerator.device = {c10::Device(c10::kCUDA, index), /*is_queued=*/true};
  accelerator.kernels = cuda_kernels([index] { return c10::cuda::getCurrentCUDAStream(index).stream(); });
  return accelerator;
}

}  // namespace tessera
