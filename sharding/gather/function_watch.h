#pragma once

// See docs/glossary.md: unit.

#include "sharding/gather/pinned_units.h"

namespace tessera {

/// Python's autograd functions, such as those of torch.compile, may read a parameter's memory in backward without an
/// operator. LibTorch shows a function's inputs when the function is applied, but not when its backward runs. So the
/// units among the inputs are noted when the function is applied. They are noted under the sequence number that the
/// function shares with its node in the graph, and are pinned while that node runs.
///
/// OpWatch calls this after a function with `units` among its inputs was applied.
void note_function(const at::RecordFunction& function, const Units& units);

}  // namespace tessera
