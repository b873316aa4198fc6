#pragma once

#include <nlohmann/json.hpp>

#include "runtime/comm/collectives.h"
#include "tessera/strategy.h"

namespace tessera {

/// Versions of Tessera and LibTorch, which belong to what must be alike on all ranks.
nlohmann::json this_build();

/// Makes sure that the ranks that make an Engine together have one strategy and one build. What may differ are folders, of which
/// each host has its own: offload.paths, checkpoint.dir and durable.dir. Collective over `control`; a hash of each rank is sent where all
/// is alike. Else throws tessera::Error on all ranks: 78, with the ranks, the keys and both values.
void expect_same_start(const Strategy& strategy, Collectives& control);

}  // namespace tessera
