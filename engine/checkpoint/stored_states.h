#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/manifest.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// The states that every trainable group has for each element, in the order of StateView::state.
std::vector<SavedState> stored_states(const Optimizer& optimizer);

/// Bytes that state `index` of a run of elements needs.
StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel);

}  // namespace tessera
