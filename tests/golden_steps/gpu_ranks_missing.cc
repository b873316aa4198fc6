// No kernels can be emulated if CUDA's headers are missing.

#include <stdexcept>

#include "tests/golden_steps/gpu_ranks.h"

namespace tessera::testing {

bool has_emulated_gpus() { return false; }

void run_on_gpus(int, bool, const std::function<void(const Mesh&)>&) {
  throw std::logic_error("this build emulates no GPUs");
}

}  // namespace tessera::testing
