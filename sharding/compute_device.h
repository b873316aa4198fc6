#pragma once

#include <c10/core/Device.h>

namespace tessera {

/// Where training state lives and operators run.
struct ComputeDevice {
  c10::Device device = c10::Device(c10::kCPU);
  /// Operators are queued on the current stream and done later, in order. Then host code may touch memory only through
  /// LibTorch, and waiting for a Work puts the wait into the queue. False on the CPU.
  bool is_queued = false;
};

}  // namespace tessera
