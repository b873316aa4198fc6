#include "sharding/gather/unit_slots.h"

#include <algorithm>

namespace tessera {

UnitSlots::UnitSlots(Arena& arena, std::int64_t root_bytes, std::int64_t others, std::int64_t bytes_of_others) {
  slots_.push_back({arena.take(root_bytes)});
  for (std::int64_t i = 0; i < others; ++i) slots_.push_back({arena.take(bytes_of_others)});
}

int UnitSlots::take(bool for_root) {
  const auto begin = for_root ? slots_.begin() : slots_.begin() + 1;
  const auto end = for_root ? slots_.begin() + 1 : slots_.end();
  const auto slot = std::find_if(begin, end, [](const Slot& slot) { return !slot.taken; });
  if (slot == end) return kNone;
  slot->taken = true;
  return static_cast<int>(slot - slots_.begin());
}

}  // namespace tessera
