#pragma once

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <memory>

#include "sharding/unit.h"

namespace tessera {

using Units = c10::SmallVector<Unit*, 4>;

/// The units that a running operator or function reads: pinned while this lives. One comes and goes with every operator that reads any, so
/// its memory is a thread's own, given out again and again.
struct PinnedUnits : at::ObserverContext {
  ~PinnedUnits() override;
  static void* operator new(std::size_t);
  static void operator delete(void* block);

  Units units;
};

/// Gathers those of `units` that somebody keeps, pins them, and notes the use of the others. Null where nothing is pinned. Does not throw: a
/// gather that fails poisons its unit (UnitKeeper::use_or_poison).
std::unique_ptr<PinnedUnits> pin(const Units& units);

}  // namespace tessera
