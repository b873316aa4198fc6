#pragma once

// See docs/glossary.md: unit.

#include <cuda_runtime_api.h>

#include "optim/arithmetic/own_squares.h"
#include "optim/norm_launch.h"
#include "optim/step_message.h"

namespace tessera::cuda {

/// Does on the GPU what NormSums (grad_norm.h) does, for all buffers: one pass over them at the speed of their memory,
/// and a small launch for nodes of more than a tile. It gives the same bits as the CPU.
cudaError_t norm_sums(const NormTables& tables, cudaStream_t stream);

/// Does on the GPU what NormTotals::add_up does: computes `squares` and `sum_of_squares` from the messages of all
/// ranks.
cudaError_t norm_totals(const StepTables& tables, cudaStream_t stream);

/// Adds up the squares of some gradients of a unit. With the unit's last gradients it adds the unit's sum to
/// `pieces.sum`. The sum of each piece has the same bits as that of sum_of_squares (sharding/reduce/squared_copy.h).
cudaError_t own_squares(const OwnPieces& pieces, cudaStream_t stream);

}  // namespace tessera::cuda
