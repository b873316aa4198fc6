#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns a group that has only this rank, for the memory of `device` (LocalCollectives works on host memory). Its
/// calls are queued on the current stream, and do not copy data that is in its place already. They refuse a SumVisitor.
std::shared_ptr<Collectives> solo_on_device(c10::Device device);

}  // namespace tessera
