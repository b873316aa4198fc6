#pragma once

#include <functional>
#include <memory>

#include "optim/device_kernels.h"
#include "runtime/comm/collectives.h"
#include "sharding/compute_device.h"

namespace tessera {

/// Where an Engine trains, and what a step runs there: the CPU, whose steps need no kernels, or a GPU.
struct Accelerator {
  ComputeDevice device;
  std::unique_ptr<DeviceKernels> kernels;  ///< null on the CPU
};

/// The device whose memory `group` moves. Throws tessera::Error (69) where this build has no kernels for it.
Accelerator accelerator_of(const Collectives& group);

/// For tests: what host memory counts as, in place of the CPU, from now on. Null: the CPU.
void set_accelerator_of_host(std::function<Accelerator()> make);

/// A GPU, with the kernels in optim/cuda (accelerator_cuda.cc, or accelerator_missing.cc).
Accelerator cuda_accelerator(int gpu);

}  // namespace tessera
