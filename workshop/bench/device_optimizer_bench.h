#pragma once

#include <absl/status/statusor.h>

#include "workshop/bench/optimizer_bench.h"

namespace tessera {

/// Makes the measurements of bench_optimizer on the current GPU. A step is the norm (if the case has one), the decision
/// and the pass, and the limit is a copy of as many bytes, half of them read and half of them written. Times are those
/// of CUDA events. Errors: 69 without a GPU, or in a build without kernels; those of CUDA.
absl::StatusOr<std::vector<OptimizerTiming>> bench_device_optimizer(std::size_t numel, int rounds);

}  // namespace tessera
