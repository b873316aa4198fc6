#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// Returns a 64-bit digest of an order of gathers; ranks compare their digests in every step. `units`: the entries of a
/// GatherLog, in their order: the indices of gathered units, and codes of guards. If ranks gather different units of
/// the same size in one call, a transport that does not compare calls reports no error, and values are wrong.
std::uint64_t digest_of_gathers(std::span<const int> units);

/// Exchanges the orders and throws tessera::Error (70). The error names the first two ranks of a shard group whose
/// orders differ, and the first gather that differs. Ranks whose digests differ call it. It is collective over the
/// world. `own`: indices of the units gathered in this step, in order.
[[noreturn]] void throw_first_difference(std::span<const int> own, const MeshAxes& axes,
                                         const std::vector<std::unique_ptr<Unit>>& units);

}  // namespace tessera
