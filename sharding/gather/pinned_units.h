#pragma once

// See docs/glossary.md: keeper, unit.

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <memory>

#include "sharding/unit.h"

namespace tessera {

/// The units among the inputs of one operator or function. Up to four units need no heap memory.
using Units = c10::SmallVector<Unit*, 4>;

/// The units that a running operator or function reads; they are pinned while this object lives. Every operator that
/// reads a unit makes a PinnedUnits, so its memory comes from blocks that the thread reuses.
struct PinnedUnits : at::ObserverContext {
  ~PinnedUnits() override;
  static void* operator new(std::size_t);
  static void operator delete(void* block);

  Units units;
};

/// Gathers and pins those of `units` that have a keeper, and notes the use of units that have a log (Unit::use_log).
/// Returns null if no unit is pinned. It does not throw: a gather that fails poisons its unit
/// (UnitKeeper::use_or_poison).
std::unique_ptr<PinnedUnits> pin(const Units& units);

}  // namespace tessera
