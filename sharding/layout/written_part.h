#pragma once

#include <cstdint>

#include "sharding/layout/placement.h"

namespace tessera {

/// Returns the part of a flat buffer of `numel` elements that the rank at `mesh` writes to a checkpoint. Each element
/// is written by one rank. If only one rank holds a part, that rank writes it. Ranks that hold the same part divide it
/// among them, at block boundaries.
Extent written_part(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel);

/// Returns an upper bound of the number of elements of a buffer that a rank writes; it is the same for all ranks. It
/// exceeds the real number by less than a block plus the number of ranks.
std::int64_t most_written(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel);

}  // namespace tessera
