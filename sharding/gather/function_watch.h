#pragma once

// See docs/glossary.md: unit.

#include "sharding/gather/pinned_units.h"

namespace tessera {

/// Python's autograd functions, those of torch.compile among them, may read a parameter's memory in backward without an
/// operator. LibTorch shows a function's inputs when it is applied and not when its backward runs. The units among the
/// inputs are therefore noted when the function is applied, under the sequence number that it shares with its node in
/// the graph, and are pinned while that node runs.
///
/// OpWatch calls this when a function was applied that has `units` among its inputs.
void note_function(const at::RecordFunction& function, const Units& units);

}  // namespace tessera
