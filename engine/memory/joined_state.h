#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sharding/unit.h"

namespace tessera {

/// One state of some parameters, or of one, whole in memory of the host: its numbers, and its scales where they have some.
struct JoinedState {
  std::vector<std::byte> data, scales;
};

/// Copies this rank's part of a state of parameter `i` of `target` from `joined`, where the parameter begins at element `begin`.
void hand_out(const JoinedState& joined, std::int64_t begin, FlatGroup& target, std::size_t i, std::size_t state);

/// Likewise of the `state`th state of its whole tensor (FlatGroup::tensor_states), which begins at `values`.
void hand_out_tensor_state(const float* values, FlatGroup& target, std::size_t i, std::size_t state);

}  // namespace tessera
