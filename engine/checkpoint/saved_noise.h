#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// Returns the line in LoadedCheckpoint::inexact for a run that was saved by a program whose noise had the version
/// `saved_version` (kNoiseVersion). It returns nothing for this program's version, or if the strategy draws no noise.
std::optional<std::string> other_noise(const Strategy& strategy, std::int64_t saved_version);

}  // namespace tessera
