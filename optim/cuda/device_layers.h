#pragma once

#include <cuda_runtime_api.h>

#include "optim/step_message.h"

namespace tessera::cuda {

/// Does the work of LAMB and LARS between their two passes, for the parameters of `layers`. It adds up the parts of
/// each parameter's norms that ranks sent, and computes the constants of the second pass. A parameter's norms change
/// the rate of its group:
///   lamb: constants[p] = rule_constants(kSgd, no numbers, steps[p], rate * trust ratio);  lars: rule_constants(kLars,
///   numbers, ...)
/// (trust_ratio.h), as LayerwiseUpdate does on the CPU. The constants do not change if the step is skipped.
cudaError_t adapt_rates(const StepRequest& request, const LayerTables& layers, const StepTables& tables,
                        cudaStream_t stream);

}  // namespace tessera::cuda
