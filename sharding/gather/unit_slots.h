#pragma once

// See docs/glossary.md: slot, unit.

#include <cstdint>
#include <vector>

#include "sharding/arena.h"

namespace tessera {

/// Places in memory for the gradients of units. One place is only for the root unit, since the root unit gets gradients
/// until the end of backward. The other units share the other places, one unit after another.
class UnitSlots {
 public:
  static constexpr int kNone = -1;

  UnitSlots() = default;
  /// Takes its memory from `arena`.
  UnitSlots(Arena& arena, std::int64_t root_bytes, std::int64_t others, std::int64_t bytes_of_others);

  /// Takes a free place for the root unit, or for another unit. Returns the number of the place, or kNone if all places
  /// are taken.
  int take(bool for_root);
  void give_back(int slot) { slots_[static_cast<std::size_t>(slot)].taken = false; }
  std::byte* memory(int slot) const { return slots_[static_cast<std::size_t>(slot)].memory; }

 private:
  struct Slot {
    std::byte* memory = nullptr;
    bool taken = false;
  };
  std::vector<Slot> slots_;  ///< the root unit's slot is the first
};

}  // namespace tessera
