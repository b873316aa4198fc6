#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/device/queued_groups.h"
#include "runtime/comm/group.h"
#include "tessera/strategy.h"

namespace tessera {

/// Makes this rank's side of a group with the `nccl` transport, with one GPU per rank (c10d::ProcessGroupNCCL). All
/// pointers are device memory.
///
/// The rules of queued_collectives.h hold here: NCCL makes the sums, and calls are ordered on the current stream.
/// Work::wait makes that stream wait and does not block the host, except for a barrier. `buffers` is the kind of memory
/// that `allocate` gives (nccl_memory.h). `groups` has this rank's other groups, which end with this group. The
/// function sets environment variables of c10d and NCCL if they are not set. torchrun sets one of them for every
/// program, so this variable is replaced under torchrun.
///
/// nccl_transport.cc is built if the CUDA toolkit, NCCL and LibTorch's CUDA library are installed. Otherwise
/// nccl_transport_missing.cc returns exit code 69, as gpu_count does.
absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group& group, int device, NcclBuffers buffers,
                                                              std::shared_ptr<QueuedGroups> groups,
                                                              std::shared_ptr<C10dStore> store);

}  // namespace tessera
