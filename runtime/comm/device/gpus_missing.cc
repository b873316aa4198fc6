#include "runtime/base/status.h"
#include "runtime/comm/device/gpus.h"

namespace tessera {

absl::StatusOr<int> gpu_count() {
  return make_error(ExitCode::kUnavailable,
                    "comm.transport wants a GPU, but this Tessera was built without CUDA. [T0458] hint: configure with "
                    "TESSERA_CUDA=ON where the CUDA toolkit, NCCL and a CUDA LibTorch are installed, or train on the "
                    "CPU (comm.transport \"host\" or \"gloo\")");
}

absl::Status use_gpu(int) { return gpu_count().status(); }

}  // namespace tessera
