#pragma once

// See docs/glossary.md: tier.

#include <memory>

#include "engine/activations/activation_tier.h"
#include "offload/spill.h"
#include "tessera/strategy.h"

namespace tessera {

/// Creates the scratch files for the activations of rank `rank` in the directories of `offload`. The tiers on disk
/// (nvme_activations, device_nvme_activations) call it once, when they are made. Throws the tessera::Errors of
/// Spill::create.
std::unique_ptr<Spill> activation_spill(const OffloadConfig& offload, int rank);

/// Returns `counts` with the disk's counts filled in from `disk`, the counters of the spill.
ActivationCounts with_disk(ActivationCounts counts, const TierCounters& disk);

}  // namespace tessera
