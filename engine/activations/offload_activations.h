#pragma once

#include <memory>

#include "engine/activations/saved_activations.h"
#include "engine/device/accelerator.h"
#include "sharding/whole_tensors.h"
#include "tessera/strategy.h"

namespace tessera {

/// Offloads the tensors that operators of the calling thread save from now on, as `"offload.activations"` says. The
/// Engine calls it when the Engine is made, and holds the returned object: null where activations stay in memory. The
/// tensors of `whole` are not offloaded. Throws the tessera::Errors of Spill::create.
std::shared_ptr<SavedActivations> offload_activations(const OffloadConfig& offload, const NamedTensors& whole,
                                                      const Accelerator& accelerator, int rank);

}  // namespace tessera
