#pragma once

#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// The run `run` of `group`, which lies in its optimizer part, as the optimizer takes it.
OptimizerSlice optimizer_slice(const FlatGroup& group, Extent run, int num_states, StateDType state_dtype);

}  // namespace tessera
