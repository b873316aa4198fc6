#pragma once

#include <nlohmann/json.hpp>

#include "runtime/comm/collectives.h"
#include "tessera/strategy.h"

namespace tessera {

/// Returns the versions of Tessera and LibTorch, which must be the same on all ranks.
nlohmann::json this_build();

/// Makes sure that the ranks that make an Engine together have one strategy and one build. Only folders may differ,
/// since each host has its own: offload.paths, checkpoint.dir and durable.dir. It is collective over `control`; each
/// rank sends a hash, and sends more only if hashes differ. In that case it throws tessera::Error (78) on all ranks,
/// with the ranks, the keys and both values.
void expect_same_start(const Strategy& strategy, Collectives& control);

}  // namespace tessera
