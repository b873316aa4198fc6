#pragma once

// See docs/glossary.md: unit.

#include <cstddef>

#include "sharding/unit.h"

namespace tessera {

/// Makes the sums of a unit's trainable groups point to `memory`, one after another.
inline void place_gradients(Unit& unit, std::byte* memory) {
  for (auto& group : unit.groups) {
    if (!group->trainable) continue;
    group->gradient = reinterpret_cast<float*>(memory);
    memory += group->gradient_part.numel * 4;
  }
}

/// Sets the pointers to a unit's sums back to null.
inline void take_gradients_away(Unit& unit) {
  for (auto& group : unit.groups) group->gradient = nullptr;
}

}  // namespace tessera
