#pragma once

// See docs/glossary.md: slot, tier.

#include <memory>

#include "engine/activations/activation_tier.h"
#include "engine/device/accelerator.h"
#include "tessera/strategy.h"

namespace tessera {

// The two tiers for activations of a GPU. Both copy values through pinned memory of the host. The copies run on streams
// of their own, beside the computation. The pinned memory is allocated when it is needed, and used again for values
// that are not larger. A loop with the same sizes in each step therefore allocates no more. Both use the accelerator's
// kernels until `close`.

/// Keeps activations in pinned memory of the host (`"offload.activations"`: `"host"`). No call but `close` waits for
/// the device.
///
/// **Out.** The tensor's storage is held until the copy out has been joined (DeviceKernels::Mark::join). After that,
/// later work in the freed memory is ordered after the copy. No more than `queue_depth` copies are on their way out;
/// the next `put` joins the oldest. **Back.** `get` joins the copy back, and begins those of the `queue_depth` values
/// that were put before it. Each copy back takes device memory when it begins.
std::unique_ptr<ActivationTier> host_activations(const Accelerator& accelerator, const OffloadConfig& offload,
                                                 int rank);

/// Keeps activations in scratch files (`"offload.activations"`: `"nvme"`, on a GPU). Throws the tessera::Errors of
/// Spill::create.
///
/// **Out.** A copy to the host begins at once, and holds the tensor's storage. Once `queue_depth` further copies have
/// begun, the host waits for this copy, frees the storage, and puts the value into the spill, which writes it in the
/// background. **Back.** `get` takes the value from the spill, which reads ahead, and queues its copy to the device.
/// `get` then takes and queues the value that was put just before in the same way. That earlier value arrives while the
/// device computes with the first one. **Host memory**: the spill's slots, which the plan counts, beside the pinned
/// memory.
std::unique_ptr<ActivationTier> device_nvme_activations(const Accelerator& accelerator, const OffloadConfig& offload,
                                                        int rank);

}  // namespace tessera
