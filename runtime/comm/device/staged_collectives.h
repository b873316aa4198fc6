#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns collectives for host memory over a `group` that moves `device`'s memory. Data is copied to the device before
/// each call and back after it, so each call waits for the device. These collectives are meant for set-up and rare
/// messages. Sums are refused.
std::shared_ptr<Collectives> staged_collectives(std::shared_ptr<Collectives> group, c10::Device device);

}  // namespace tessera
