#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/strategy.h"

namespace tessera {

/// What LoadedCheckpoint::inexact says of a run that was saved by a program whose noise had `saved_version` (kNoiseVersion).
/// Nothing where it is this program's, or where the strategy draws none.
std::optional<std::string> other_noise(const Strategy& strategy, std::int64_t saved_version);

}  // namespace tessera
