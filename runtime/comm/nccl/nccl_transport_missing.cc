#include "runtime/comm/device/gpus.h"
#include "runtime/comm/nccl/nccl_transport.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group&, int, NcclBuffers,
                                                              std::shared_ptr<QueuedGroups>,
                                                              std::shared_ptr<C10dStore>) {
  return gpu_count().status();  // the error names the part that this build lacks
}

}  // namespace tessera
