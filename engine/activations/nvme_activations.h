#pragma once

// See docs/glossary.md: slot, tier.

#include <memory>

#include "engine/activations/activation_tier.h"
#include "offload/spill.h"
#include "tessera/strategy.h"

namespace tessera {

/// Keeps activations of a CPU in scratch files (`"offload.activations"`: `"nvme"`, on the CPU). `put` copies the bytes
/// into the spill's slots, so the caller may free its memory when `put` returns. Throws the tessera::Errors of
/// Spill::create.
std::unique_ptr<ActivationTier> nvme_activations(const OffloadConfig& offload, int rank);

/// Creates the scratch files for the activations of rank `rank` in the directories of `offload`. The tiers on disk
/// (nvme_activations, device_nvme_activations) call it once, when they are made. Throws the tessera::Errors of
/// Spill::create.
std::unique_ptr<Spill> activation_spill(const OffloadConfig& offload, int rank);

/// Returns `counts` with the disk's counts filled in from `disk`, the counters of the spill.
ActivationCounts with_disk(ActivationCounts counts, const TierCounters& disk);

}  // namespace tessera
