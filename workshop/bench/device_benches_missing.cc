#include "runtime/base/status.h"
#include "workshop/bench/codec_speed.h"
#include "workshop/bench/optimizer_bench.h"

namespace tessera {
namespace {

absl::Status no_kernels() {
  return make_error(ExitCode::kUnavailable,
                    "this build has no CUDA kernels. [T0735] hint: configure where nvcc is found (`tessera doctor`)");
}

}  // namespace

absl::StatusOr<std::vector<PassTiming>> bench_device_optimizer(std::size_t, int) { return no_kernels(); }

absl::StatusOr<std::vector<PassTiming>> bench_device_codecs(std::size_t, int) { return no_kernels(); }

}  // namespace tessera
