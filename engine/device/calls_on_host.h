#pragma once

// See docs/glossary.md: residency, slot.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "optim/device_kernels.h"
#include "runtime/comm/collectives.h"

namespace tessera {

/// Pinned memory for calls that hosts make: `slots` pieces of `slot_bytes` (MemoryPlan::SlotsOnHost). A sum or
/// gather that is under way holds one piece.
struct CallSlots {
  std::shared_ptr<std::byte> memory;
  std::int64_t slots = 0, slot_bytes = 0;
};

/// Returns a group for the memory of a GPU. Sums whose ReduceOptions have a method or a codec are made on the ranks'
/// hosts, over `host`, which is a compressing group of the same ranks for host memory. So these sums have the
/// same bits as on ranks that train on the CPU. `group` makes all other calls. An Engine on a GPU makes such a group
/// for each axis that "compression" names; the Reducer calls it as any other group.
///
/// | call            | what happens                                                                           |
/// |-----------------|----------------------------------------------------------------------------------------|
/// | the call itself | the contribution's copy to a slot is queued behind the current stream; nobody waits    |
/// | Work::advance   | the host waits for that copy, and starts the sum over `host`, whose own thread goes on |
/// | Work::wait      | the host waits for the sum; its copy to the GPU is queued; the current stream waits    |
///
/// Sums are advanced and waited for in the order in which they were started, on one thread. SumVisitors are refused.
/// Errors: those of both groups. `kernels` must outlive all calls.
std::shared_ptr<Collectives> sums_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                          DeviceKernels& kernels, const CallSlots& slots);

/// Returns a group for the memory of a GPU. All-gathers that send values in another form (GatherOptions::form) are made
/// on the ranks' hosts, over `host`, which is a compressing group of the same ranks for host memory. So these gathers
/// have the same bits as on ranks that train on the CPU. `group` makes all other calls. An Engine on a GPU makes such a
/// group for each axis on which "compression.gathers" has an effect. The Residency and the Publisher call it as any
/// other group.
///
/// | call            | what happens                                                                           |
/// |-----------------|----------------------------------------------------------------------------------------|
/// | the call itself | this rank's part is queued to be copied to a slot; earlier gathers whose part is there |
/// |                 | begin over `host`, whose own thread goes on                                            |
/// | Work::wait      | the host waits for the gather; its copy to the GPU is queued; the current stream waits |
///
/// Gathers begin over `host` in the order in which they were started, on one thread. A gather that finds no free slot
/// first waits for the oldest gather. Errors: those of both groups. `kernels` must outlive all calls.
std::shared_ptr<Collectives> gathers_on_host(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> host,
                                             DeviceKernels& kernels, const CallSlots& slots);

}  // namespace tessera
