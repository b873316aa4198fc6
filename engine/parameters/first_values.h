#pragma once

// See docs/glossary.md: unit.

#include <memory>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/unit.h"

namespace tessera {

/// Gives parameters their first values and their places: writes this rank's parts of parameters and masters, and makes
/// the user's tensors views of the flat buffers. Every rank gets rank 0's values. An Engine makes a FirstValues while
/// the Engine itself is made, calls `load` for every unit, and then destroys the FirstValues.
///
/// | a parameter that is                        | gets its values                                              |
/// |--------------------------------------------|--------------------------------------------------------------|
/// | deferred on all ranks, and made in pieces  | each rank makes its own part (engine/init/piece_maker.h)     |
/// | deferred, but cannot be made in pieces      | rank 0 makes all of it and sends it                          |
/// | real, or deferred on some ranks only       | rank 0 sends its own values                                  |
/// | left by an earlier Engine                  | its masters are joined from all ranks                        |
///
/// In the constructor, ranks compare how they make values:
/// - If only generators' states differ (another seed), rank 0 sends its states.
/// - If LibTorch draws different numbers from the same state on two ranks (another kind of processor), rank 0 sends all
///   values.
/// - If a deferred parameter comes from other operators than on rank 0, or ranks have different parameters, every rank
///   throws tessera::Error (64), which names the first difference.
///
/// A FirstValues needs some MiB of host memory beyond the plan, and memory for each parameter that is made whole. Its
/// calls are collective over `control` (MeshAxes), which must outlive it.
class FirstValues {
 public:
  /// Compares how ranks make values, in one small exchange, or in three if operators differ. The memory of `units` need
  /// not be allocated yet.
  FirstValues(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control);
  ~FirstValues();
  FirstValues(const FirstValues&) = delete;
  FirstValues& operator=(const FirstValues&) = delete;

  /// Fills one unit. Ranks call it once for every unit, in the same order. REQUIRES: the unit's memory is in place.
  void load(Unit& unit);

 private:
  class Sources;
  std::unique_ptr<Sources> sources_;
};

}  // namespace tessera
