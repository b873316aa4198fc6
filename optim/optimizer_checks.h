#pragma once

#include <cstdint>
#include <string_view>

#include "optim/optimizer.h"
#include "optim/step_arguments.h"

namespace tessera {

/// The slice as the loops take it. Throws `std::invalid_argument` that names the optimizer, the part, the wanted and
/// the given, unless every part of the slice has the length that an optimizer with `num_states` states of `states`
/// needs, the parameter's dtype is one that the master's kind can be written to, and a run with 8-bit states begins at
/// a block. A mismatch is a bug of the caller; checking costs nothing beside the loop, and writing past a shard would
/// corrupt a neighbour silently.
StepArguments check_slice(std::string_view optimizer, int num_states, StateDType states, std::int64_t step,
                          const OptimizerSlice& slice);

}  // namespace tessera
