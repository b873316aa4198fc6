#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sharding/unit.h"

namespace tessera {

/// One whole state of one parameter or of several, in memory of the host: its numbers, and its scales if it has any.
struct JoinedState {
  std::vector<std::byte> data, scales;
};

/// Copies this rank's part of state number `state` of parameter `i` of `target` from `joined`, in which the parameter
/// begins at element `begin`.
void hand_out(const JoinedState& joined, std::int64_t begin, FlatGroup& target, std::size_t i, std::size_t state);

/// Copies this rank's part of a state of the whole tensor (GroupShape::tensor_states) from `values`, which holds the
/// whole state. `state` is its number for that parameter.
void hand_out_tensor_state(const float* values, FlatGroup& target, std::size_t i, std::size_t state);

}  // namespace tessera
