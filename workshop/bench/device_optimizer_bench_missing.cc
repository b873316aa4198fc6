#include "runtime/base/status.h"
#include "workshop/bench/optimizer_bench.h"

namespace tessera {

absl::StatusOr<std::vector<OptimizerTiming>> bench_device_optimizer(std::size_t, int) {
  return make_error(ExitCode::kUnavailable,
                    "this build has no CUDA kernels. [T0735] hint: configure where nvcc is found (`tessera doctor`)");
}

}  // namespace tessera
