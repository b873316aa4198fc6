#pragma once

#include <memory>

#include "engine/activations/saved_activations.h"
#include "engine/device/accelerator.h"
#include "sharding/whole_tensors.h"
#include "tessera/strategy.h"

namespace tessera {

/// Offloads what the calling thread's operators save from now on, as "offload.activations" says; null where that is memory.
/// `whole`: these stay where they are. Throws tessera::Error: those of Spill::create.
std::shared_ptr<SavedActivations> offload_activations(const OffloadConfig& offload, const NamedTensors& whole,
                                                      const Accelerator& accelerator, int rank);

}  // namespace tessera
