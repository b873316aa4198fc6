#pragma once

// See docs/glossary.md: slot, unit.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "sharding/arena.h"
#include "sharding/gather/unit_slots.h"
#include "sharding/reduce/pack/gradient_packer.h"
#include "sharding/unit.h"

namespace tessera {

/// A unit's gradients, from backward to their sum. Reducer has a ReducedUnit for each unit, and passes it to its parts.
struct ReducedUnit {
  enum class Phase : std::uint8_t { kIdle, kFilling, kReady };
  /// Memory for the gradients until they are reduced, or for their sum.
  struct Memory {
    std::byte* memory = nullptr;
    int slot = UnitSlots::kNone;
    Arena overflow;  ///< memory beyond the plan, used if there was no free slot
  };

  ReducedUnit(Unit* unit, GradientPacker gradients) : unit(unit), gradients(std::move(gradients)) {}

  Unit* unit;
  GradientPacker gradients;
  std::int64_t bucket_bytes = 0, sum_bytes = 0;
  Phase phase = Phase::kIdle;
  Memory bucket;
  Memory sum;            ///< used if units are updated in backward
  bool reduced = false;  ///< whether the unit was reduced in this round
  bool has_sum = false;  ///< whether FlatGroup::gradient holds a sum of this step, or will hold one
  /// Used if there is only one rank: the number of gradients taken in this round, and the number at the last call of
  /// `Reducer::on_reduced`.
  std::int64_t taken = 0, told = 0;
};

}  // namespace tessera
