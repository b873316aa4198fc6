#include "runtime/base/status.h"
#include "runtime/comm/nccl/nccl_transport.h"

namespace tessera {

absl::Status nccl_available() {
  return make_error(ExitCode::kUnavailable,
                    "comm.transport wants a GPU, but this Tessera was built without CUDA; configure with "
                    "TESSERA_CUDA=ON where the CUDA toolkit, NCCL and a CUDA LibTorch are installed");
}

absl::StatusOr<int> gpu_count() { return nccl_available(); }

absl::Status use_gpu(int) { return nccl_available(); }

absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group&, int, NcclBuffers,
                                                              std::shared_ptr<QueuedGroups>,
                                                              std::shared_ptr<C10dStore>) {
  return nccl_available();
}

}  // namespace tessera
