#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "optim/adafactor.h"

namespace tessera::cuda {

/// Makes the step of tessera::step_adafactor for a tensor in device memory, with the same bits. `scratch` has
/// adafactor_scratch(tensor) numbers.
cudaError_t step_adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& tensor,
                           std::span<double> scratch, cudaStream_t stream);

}  // namespace tessera::cuda
