#include "runtime/base/status.h"
#include "runtime/comm/cuda_host/cuda_host_collectives.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<PeerDevice>> cuda_peer_device(int) {
  return make_error(ExitCode::kUnavailable,
                    "comm.transport is \"cuda_host\", but this Tessera was built without CUDA's compiler. [T0453] "
                    "hint: configure with TESSERA_CUDA=ON where nvcc is installed, or train on the CPU (comm.transport "
                    "\"host\" or \"gloo\")");
}

}  // namespace tessera
