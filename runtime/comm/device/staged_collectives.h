#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// `group`'s collectives for host memory, where `group` moves that of `device`: what is sent goes up before each call
/// and comes down after it, so each call waits for the device. For set-up and for messages that are rare. Sums are
/// refused.
std::shared_ptr<Collectives> staged_collectives(std::shared_ptr<Collectives> group, c10::Device device);

}  // namespace tessera
