#pragma once

#include <functional>

#include "tessera/mesh.h"

namespace tessera::testing {

/// Returns whether this build can emulate GPUs (tests/engine/device/emulated_gpu.h).
bool has_emulated_gpus();

/// Does the same as run_ranks, on emulated GPUs. If `shared`, ranks share one GPU (transport cuda_host). Otherwise each
/// has its own GPU, and a late c10d backend joins them, as NCCL would. REQUIRES: has_emulated_gpus().
void run_on_gpus(int ranks, bool shared, const std::function<void(const Mesh&)>& body);

}  // namespace tessera::testing
