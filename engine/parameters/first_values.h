#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/unit.h"

namespace tessera {

/// Gives parameters their first values and their places: writes this rank's parts of parameters and masters, and makes
/// the user's tensors views of the flat buffers. Values are rank 0's on every rank.
///
/// | a parameter that is                        | gets its values                                              |
/// |--------------------------------------------|--------------------------------------------------------------|
/// | deferred on all ranks, and made in pieces  | each rank makes its own part (engine/init/piece_maker.h)     |
/// | deferred, but not to be cut                | rank 0 makes all of it and sends it                          |
/// | real, or deferred on some ranks only       | rank 0 sends its own                                         |
/// | left by an earlier Engine                  | its masters, joined from all ranks                           |
///
/// When it is made, ranks compare how they make values. Where only generators' states differ (another seed), rank 0's are sent;
/// where ranks' LibTorch draws different numbers from one state (another kind of processor), rank 0 sends all values.
/// Where a deferred parameter comes from other operators than on rank 0, or ranks have different parameters, every rank
/// throws (exit code 64) and names the first difference.
///
/// Needs some MiB of host memory beyond the plan, and a whole parameter where that is made whole. Collective over
/// `control` (MeshAxes), which must outlive it.
class FirstValues {
 public:
  /// Two small exchanges. `units` need no memory yet.
  FirstValues(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control);
  ~FirstValues();
  FirstValues(const FirstValues&) = delete;
  FirstValues& operator=(const FirstValues&) = delete;

  /// Every unit once, in the same order on all ranks. REQUIRES: the unit's memory is in place.
  void load(Unit& unit);

 private:
  class Sources;
  std::unique_ptr<Sources> sources_;
};

}  // namespace tessera
