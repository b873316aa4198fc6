#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/device/queued_groups.h"
#include "runtime/comm/group.h"
#include "tessera/strategy.h"

namespace tessera {

/// The `nccl` transport: one GPU a rank (c10d::ProcessGroupNCCL); all pointers are the device's.
///
/// What holds of queued_collectives.h holds here: sums are NCCL's, calls are ordered on the current stream, Work::wait makes
/// that stream wait and, but for a barrier, does not block the host. `buffers`: of what `allocate` gives (nccl_memory.h).
/// `groups`: this rank's other groups, which end with this one. Sets c10d's and NCCL's variables in the environment where
/// they are not set (under torchrun one that is set, as torchrun sets it for every program).
///
/// Built where the CUDA toolkit, NCCL and LibTorch's CUDA library are (nccl_transport.cc); elsewhere
/// nccl_transport_missing.cc answers with exit code 69, as gpu_count does.
absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group& group, int device, NcclBuffers buffers,
                                                              std::shared_ptr<QueuedGroups> groups,
                                                              std::shared_ptr<C10dStore> store);

}  // namespace tessera
