#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/device/queued_groups.h"
#include "runtime/comm/group.h"
#include "runtime/config/strategy.h"

namespace tessera {

/// The `nccl` transport: one GPU a rank (c10d::ProcessGroupNCCL); all pointers are the device's.
///
/// What holds of queued_collectives.h holds here: sums are NCCL's, calls are ordered on the current stream, Work::wait makes
/// that stream wait and, but for a barrier, does not block the host. `buffers`: of what `allocate` gives (nccl_memory.h).
/// `groups`: this rank's other groups, which end with this one. Sets c10d's and NCCL's variables in the environment where
/// they are not set (under torchrun one that is set, as torchrun sets it for every program).
///
/// Built where the CUDA toolkit, NCCL and LibTorch's CUDA library are (nccl_transport.cc); elsewhere
/// nccl_transport_missing.cc answers with exit code 69.
absl::StatusOr<std::shared_ptr<Collectives>> nccl_collectives(const Group& group, int device, NcclBuffers buffers,
                                                              std::shared_ptr<QueuedGroups> groups,
                                                              std::shared_ptr<C10dStore> store);

/// OK if this build has CUDA and NCCL, and this machine a GPU.
absl::Status nccl_available();

/// GPUs of this machine. Errors: 69 as nccl_available.
absl::StatusOr<int> gpu_count();

/// This thread's GPU from now on. Errors: 69 as nccl_available, 78 where this machine has no GPU of that index.
absl::Status use_gpu(int index);

}  // namespace tessera
