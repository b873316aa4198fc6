#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/device/exposed_communication.h"
#include "optim/device_kernels.h"
#include "runtime/comm/collectives.h"
#include "sharding/compute_device.h"

namespace tessera {

/// Bytes that LibTorch's allocator has given out on a device.
struct AllocatedBytes {
  std::int64_t now = 0, peak = 0;  ///< peak: the largest number since the last call of Accelerator::forget_peak
};

/// The device on which an Engine trains, and the objects that a step needs there. The Engine makes it and owns it.
/// Steps of the CPU need no kernels: every member but `device` is null on the CPU.
struct Accelerator {
  ComputeDevice device;
  std::unique_ptr<DeviceKernels> kernels;
  std::unique_ptr<ExposedCommunication> exposed;  ///< the object that device.waits points to
  std::function<AllocatedBytes()> allocated;
  std::function<void()> forget_peak;
  std::string name;  ///< "NVIDIA H200"; empty on the CPU
};

/// Returns an accelerator for a device whose operators are queued, with the kernels `kernels`.
Accelerator queued_accelerator(c10::Device device, std::unique_ptr<DeviceKernels> kernels);

/// Returns the device whose memory `group` moves. Throws tessera::Error (69) if this build has no kernels for it.
Accelerator accelerator_of(const Collectives& group);

/// Only tests call this: from now on host memory is treated as the memory of the accelerator that `make` returns. If
/// `make` is null, it is the CPU's memory again.
void set_accelerator_of_host(std::function<Accelerator()> make);

/// Returns GPU `gpu`, with the kernels in optim/cuda. Throws tessera::Error (69) in a build without CUDA's compiler
/// (accelerator_missing.cc).
Accelerator cuda_accelerator(int gpu);

}  // namespace tessera
