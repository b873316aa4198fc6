#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/cuda_host/peer_device.h"
#include "runtime/comm/group.h"

namespace tessera {

/// The `cuda_host` transport: ranks in processes of one host that share one GPU, or have one GPU each and can reach
/// their peers' GPUs. They read each other's device memory directly, on a queue beside the compute queue. Sums have the
/// bits of `host`. With this transport, programs for many GPUs can run on one GPU: the order of events is the same.
///
/// `host` is a transport for host memory among the same ranks; only this object uses it. The processes make a barrier
/// when a call starts, and again when the call is waited for. In the first barrier, each rank sends the place of its
/// buffer and the call that it makes, so different calls are noticed. Devices wait for each other by events, and no
/// process waits for a device:
///
///   rank's compute queue   ... record ready[k]                                  wait for all done[k] ...
///   rank's side queue                wait for all ready[k], read peers, record done[k]
///
/// The call is collective over the group. Errors: 75 and 70 as for the transport `host`; 71 if a GPU gives no handles.
absl::StatusOr<std::shared_ptr<Collectives>> cuda_host_collectives(const Group& group,
                                                                   std::shared_ptr<Collectives> host,
                                                                   std::unique_ptr<PeerDevice> device);

/// Returns the GPU `index` of this process (cuda/peer_device_cuda.cc). Error: 69 if this build has no kernels, or the
/// machine no GPU.
absl::StatusOr<std::unique_ptr<PeerDevice>> cuda_peer_device(int index);

}  // namespace tessera
