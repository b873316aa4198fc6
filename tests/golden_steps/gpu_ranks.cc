#include "tests/golden_steps/gpu_ranks.h"

#include "tests/engine/device/emulated_gpu.h"

namespace tessera::testing {

bool has_emulated_gpus() { return true; }

void run_on_gpus(int ranks, bool shared, const std::function<void(const Mesh&)>& body) {
  const EmulatedGpus gpus;
  run_ranks(shared ? on_one_gpu({.ranks = ranks}) : over_backend({.ranks = ranks}), body);
}

}  // namespace tessera::testing
