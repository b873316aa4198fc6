#pragma once

#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/step_context.h"
#include "optim/device_kernels.h"
#include "sharding/compute_device.h"

namespace tessera {

/// The inputs from which the parts of a GPU's step (QueuedStep) are made: a StepContext, and objects that only a GPU
/// has. `rates` are the learning rates that the step itself holds.
struct QueuedContext : StepContext {
  DeviceKernels& kernels;
  ComputeDevice device;
  const LearningRates& rates;
};

}  // namespace tessera
