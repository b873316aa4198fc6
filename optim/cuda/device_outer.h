#pragma once

#include <cuda_runtime_api.h>

#include "optim/arithmetic/outer_rule.h"
#include "optim/arithmetic/step_arguments.h"

namespace tessera::cuda {

/// Makes one pass of an outer step, in one launch. It gives the same bits as tessera::outer_pass on the CPU.
cudaError_t outer_pass(const OuterRun& run, cudaStream_t stream);

/// Writes `masters` [to.numel], fp32, over the weights `to`, in the format to.weights: the masters themselves, and
/// parameters that are rounded from them. If to.master and to.low are null and there is a parameter, another rank has
/// the masters, and only the parameter is written. The result has the same bits as that of write_values on the CPU,
/// except for the payloads of NaNs. read_weights does the reverse.
cudaError_t write_weights(const StepArguments& to, const float* masters, cudaStream_t stream);

}  // namespace tessera::cuda
