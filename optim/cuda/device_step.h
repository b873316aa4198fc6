#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optim/adam_constants.h"
#include "optim/step_arguments.h"

namespace tessera::cuda {

/// What the GPU decides about a step, and what it needs to know of the one before; in device memory, so that nobody waits
/// for it. All zero bytes before the first step.
struct DeviceDecision {
  double grad_norm;            ///< of the mean gradient, before clipping
  float gradient_scale;        ///< clip / (ranks * microbatches * loss scale)
  std::int32_t is_skipped;     ///< a gradient is infinite or NaN: this step changes nothing
  std::int64_t applied, skipped;  ///< steps so far, this one included
};

/// What the host knows of a step beforehand. By value.
struct StepRequest {
  AdamHyperparameters adam;
  float lr = 0.0f;
  double mean = 1.0;      ///< 1 / (ranks * microbatches * loss scale)
  double max_norm = 0.0;  ///< gradient_clipping; 0: none
};

/// Decides the step from the sum of squares of all (summed, unscaled) gradients, as Engine::step does on the CPU, and
/// folds the constants of each parameter:
///   norm = sqrt(sum_of_squares) * mean;  clip = max_norm > 0 ? min(1, max_norm / (norm + 1e-6)) : 1
///   steps[p] += used[p], constants[p] = adam_constants(adam, steps[p], lr, mean * clip), unless skipped
/// Everything but the request is device memory: `sum_of_squares` [1], `used`, `steps` and `constants` [parameters].
cudaError_t decide_step(const StepRequest& request, const double* sum_of_squares, const std::uint8_t* used,
                        std::int64_t* steps, AdamConstants* constants, int parameters, DeviceDecision* decision,
                        cudaStream_t stream);

/// One run of a flat group, as OptimizerSlice, in device memory.
struct DeviceRun {
  StepArguments arguments;      ///< but for `noise`, which the GPU derives from the two below
  std::uint64_t stream = 0;     ///< number of the group, for stochastic rounding
  std::int64_t first_step = 0;  ///< index of the run's parameter in decide_step's arrays
};

/// The optimizer's pass over one run, in one launch: reads gradient, master and moments once and writes each once. The
/// same bits as AdamW::step gives on the CPU. Does nothing if the decision is to skip.
/// REQUIRES: the run begins at a multiple of 32 elements of its group (of 256 with 8-bit states), whose buffers are
/// aligned to 128 bytes: cudaErrorMisalignedAddress else.
cudaError_t adam_step(const DeviceRun& run, const DeviceDecision* decision, const std::int64_t* steps,
                      const AdamConstants* constants, cudaStream_t stream);

}  // namespace tessera::cuda
