#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// The line of LoadedCheckpoint::inexact for a run whose rate rises over samples, where what was saved after `steps`
/// updates does not say how many samples they had (Engine::samples_seen). Nothing where that is known or not needed.
std::optional<std::string> unknown_samples(const Strategy& strategy, std::int64_t steps, std::int64_t samples);

}  // namespace tessera
