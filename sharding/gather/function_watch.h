#pragma once

#include "sharding/gather/pinned_units.h"

namespace tessera {

/// Python's autograd functions, those of torch.compile among them, may read a parameter's memory in backward without an operator. LibTorch
/// shows a function's inputs when it is applied and not when its backward runs. So the units among the inputs are noted at the apply, by
/// the sequence number that the function shares with its node in the graph, and are pinned while that node runs.
///
/// For OpWatch: a function was applied that has `units` among its inputs.
void note_function(const at::RecordFunction& function, const Units& units);

}  // namespace tessera
