#pragma once

// See docs/glossary.md: residency, slot.

#include <memory>

#include "engine/device/sums_on_host.h"
#include "optim/device_kernels.h"
#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns a group for the memory of a GPU. The ranks' hosts make its all-gathers in another form
/// (GatherOptions::form). `group` makes all other calls. So a gather has the bits that the CPU's ranks get over `host`,
/// a group of the same ranks for the memory of their hosts, which compresses. An Engine on a GPU makes one for each
/// axis on which "compression.gathers" has an effect; the Residency and the Publisher call it as any other group.
///
/// | call            | what happens                                                                           |
/// |-----------------|----------------------------------------------------------------------------------------|
/// | the call itself | this rank's part is queued to be copied to a slot; earlier gathers whose part is there |
/// |                 | begin over `host`, whose own thread goes on                                            |
/// | Work::wait      | the host waits for the gather; its copy up is queued, and the current stream waits     |
///
/// Gathers begin over `host` in the order in which they were started, on one thread. A gather that finds no free slot
/// ends the oldest one first. Errors: those of both groups. `kernels` must outlive all calls.
std::shared_ptr<Collectives> gathers_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                             DeviceKernels& kernels, const HostSlots& slots);

}  // namespace tessera
