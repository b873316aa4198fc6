#pragma once

#include <memory>

#include "engine/activations/activation_tier.h"
#include "offload/spill.h"
#include "tessera/strategy.h"

namespace tessera {

/// Scratch files for a rank's activations, in the directories of `offload`. Throws tessera::Error: those of Spill::create.
std::unique_ptr<Spill> activation_spill(const OffloadConfig& offload, int rank);

/// `counts`, with the spill's.
ActivationCounts with_disk(ActivationCounts counts, const TierCounters& disk);

}  // namespace tessera
