#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "optim/device_kernels.h"

namespace tessera {

/// Makes the kernels of optim/cuda; they run on the stream that `current_stream` returns at each call.
std::unique_ptr<DeviceKernels> cuda_kernels(std::function<cudaStream_t()> current_stream);

}  // namespace tessera
