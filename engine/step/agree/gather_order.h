#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// 64 bits that tell one order of gathers from another: what ranks compare in every step. A gather that a rank makes
/// for another unit of the same size succeeds on transports that do not compare calls, with wrong values.
std::uint64_t digest_of_gathers(std::span<const int> units);

/// For ranks whose digests differ: exchanges the orders and throws (exit code 70), naming the first two ranks of a
/// shard group that differ, and where. Collective over the world. `own`: indices of the units gathered in this step, in
/// order.
[[noreturn]] void throw_first_difference(std::span<const int> own, const MeshAxes& axes,
                                         const std::vector<std::unique_ptr<Unit>>& units);

}  // namespace tessera
