#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "engine/device/exposed_communication.h"
#include "optim/device_kernels.h"
#include "runtime/comm/collectives.h"
#include "sharding/compute_device.h"

namespace tessera {

/// What LibTorch's allocator has given out on a device.
struct AllocatedBytes {
  std::int64_t now = 0, peak = 0;  ///< peak: since it was last asked to forget it
};

/// Where an Engine trains, and what a step runs there: the CPU, whose steps need no kernels, or a GPU. The rest is null on
/// the CPU.
struct Accelerator {
  ComputeDevice device;
  std::unique_ptr<DeviceKernels> kernels;
  std::unique_ptr<ExposedCommunication> exposed;  ///< device.waits
  std::function<AllocatedBytes()> allocated;
  std::function<void()> forget_peak;
};

/// A device whose operators are queued, with these kernels.
Accelerator queued_accelerator(c10::Device device, std::unique_ptr<DeviceKernels> kernels);

/// The device whose memory `group` moves. Throws tessera::Error (69) where this build has no kernels for it.
Accelerator accelerator_of(const Collectives& group);

/// For tests: from now on host memory counts as that of the accelerator that `make` returns. Null: as the CPU's again.
void set_accelerator_of_host(std::function<Accelerator()> make);

/// A GPU, with the kernels in optim/cuda (accelerator_cuda.cc, or accelerator_missing.cc).
Accelerator cuda_accelerator(int gpu);

}  // namespace tessera
