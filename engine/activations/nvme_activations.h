#pragma once

// See docs/glossary.md: slot.

#include <memory>

#include "engine/activations/activation_tier.h"
#include "tessera/strategy.h"

namespace tessera {

/// Keeps activations of a CPU in scratch files (`"offload.activations"`: `"nvme"`, on the CPU). `put` copies the bytes
/// into the spill's slots, so the caller may free its memory when `put` returns. Throws the tessera::Errors of
/// Spill::create.
std::unique_ptr<ActivationTier> nvme_activations(const OffloadConfig& offload, int rank);

}  // namespace tessera
