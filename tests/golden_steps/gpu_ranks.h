#pragma once

#include <functional>

#include "tessera/mesh.h"

namespace tessera::testing {

/// Whether this build can emulate GPUs (tests/engine/device/emulated_gpu.h).
bool has_emulated_gpus();

/// As run_ranks, on emulated GPUs. `shared`: the ranks share one (transport cuda_host); else each has its own, and a
/// late c10d backend joins them, as by NCCL. REQUIRES: has_emulated_gpus().
void run_on_gpus(int ranks, bool shared, const std::function<void(const Mesh&)>& body);

}  // namespace tessera::testing
