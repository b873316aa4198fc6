#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/cuda_host/peer_device.h"
#include "runtime/comm/group.h"

namespace tessera {

/// The `cuda_host` transport: ranks in processes of one host that share one GPU, or have one each and can reach their
/// peers'. They read each other's device memory where it lies, on a queue beside compute. Sums are those of `host`, bit
/// for bit. Its use is to run on one card what was made for many: the order of events is the same.
///
/// `host` is a transport for host memory among the same ranks, which this object has for itself. Hosts meet when a call
/// starts (each says where its buffer is and what it calls, so disagreement is noticed) and again when it is waited for;
/// devices meet by events, and no host waits for a device:
///
///   rank's compute queue   ... record ready[k]                                  wait for all done[k] ...
///   rank's side queue                wait for all ready[k], read peers, record done[k]
///
/// Collective. Errors of making it: 75, 70 as `host`; 71 where a GPU gives no handles.
absl::StatusOr<std::shared_ptr<Collectives>> cuda_host_collectives(const Group& group,
                                                                   std::shared_ptr<Collectives> host,
                                                                   std::unique_ptr<PeerDevice> device);

/// The GPU `index` of this process (cuda/peer_device_cuda.cc; 69 where this build has no kernels, or the machine no GPU).
absl::StatusOr<std::unique_ptr<PeerDevice>> cuda_peer_device(int index);

}  // namespace tessera
