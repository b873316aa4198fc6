#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "optim/device_kernels.h"

namespace tessera {

/// The kernels of optim/cuda, on the stream that `current_stream` names at each call.
std::unique_ptr<DeviceKernels> cuda_kernels(std::function<cudaStream_t()> current_stream);

}  // namespace tessera
