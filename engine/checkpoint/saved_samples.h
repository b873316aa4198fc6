#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// Returns the line of LoadedCheckpoint::inexact for a run whose rate rises over samples, if the save after `steps`
/// updates lacks their number of samples (Engine::samples_seen). Returns nothing where that is known or not needed.
std::optional<std::string> unknown_samples(const Strategy& strategy, std::int64_t steps, std::int64_t samples);

}  // namespace tessera
