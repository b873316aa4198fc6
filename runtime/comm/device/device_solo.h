#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns a group of this rank alone whose memory is that of `device` (LocalCollectives works on host memory). Calls
/// are queued on the current stream and move nothing that is in place already; they refuse a SumVisitor.
std::shared_ptr<Collectives> solo_on_device(c10::Device device);

}  // namespace tessera
