#pragma once

#include <cuda_runtime_api.h>

#include "optim/norm_launch.h"
#include "optim/step_message.h"

namespace tessera::cuda {

/// NormSums (grad_norm.h) on the GPU, of all buffers: one pass over them at the speed of their memory, and a small launch
/// for nodes of more than a tile. The same bits as on the CPU.
cudaError_t norm_sums(const NormTables& tables, cudaStream_t stream);

/// NormTotals::add_up on the GPU: from the messages of all ranks to `squares` and `sum_of_squares`.
cudaError_t norm_totals(const StepTables& tables, cudaStream_t stream);

}  // namespace tessera::cuda
