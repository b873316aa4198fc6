#pragma once

#include <cstdint>

#include "sharding/layout/placement.h"

namespace tessera {

/// Returns the part of a flat buffer of `numel` elements that the rank at `mesh` writes to a checkpoint. Each element
/// is written by one rank: a rank that alone holds a part writes it, and ranks that hold the same part divide it among
/// them, between blocks.
Extent written_part(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel);

/// Returns an upper bound of the elements that any rank writes of a buffer, the same for all ranks. It exceeds what a
/// rank writes by less than a block plus the number of ranks.
std::int64_t most_written(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel);

}  // namespace tessera
