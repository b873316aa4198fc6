#pragma once

// See docs/glossary.md: unit.

#include <cuda_runtime_api.h>

#include "optim/arithmetic/own_squares.h"
#include "optim/norm_launch.h"
#include "optim/step_message.h"

namespace tessera::cuda {

/// Does the work of NormSums (grad_norm.h) on the GPU, for all buffers, with the same bits. It makes one pass over the
/// buffers at the speed of memory, and a small launch for nodes that are larger than a tile.
cudaError_t norm_sums(const NormTables& tables, cudaStream_t stream);

/// Does the work of NormTotals::add_up on the GPU: computes `squares` and `sum_of_squares` from the messages of all
/// ranks.
cudaError_t norm_totals(const StepTables& tables, cudaStream_t stream);

/// Adds up the squares of some gradients of a unit. After the unit's last gradients it adds the unit's sum to
/// `pieces.sum`. The sum of each piece has the same bits as the result of sum_of_squares
/// (sharding/reduce/pack/squared_copy.h).
cudaError_t own_squares(const OwnPieces& pieces, cudaStream_t stream);

}  // namespace tessera::cuda
