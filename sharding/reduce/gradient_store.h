#pragma once

#include "sharding/unit.h"

namespace tessera {

/// Where the sums of a unit's gradients lie from its reduction to its update, where that is not memory of their own. Throws
/// tessera::Error (74) where they cannot be read, or could not be written.
class GradientStore {
 public:
  virtual ~GradientStore() = default;

  /// The unit's sums are opened soon, and added to.
  virtual void expect(const Unit& unit) = 0;
  /// Gives the sums memory until `close`, and points FlatGroup::gradient of what trains there. `has_sum`: with what they were when
  /// they were closed last; else with anything. A unit that is open already is opened once more, and closed as often.
  virtual void open(Unit& unit, bool has_sum) = 0;
  /// `changed`: they are kept as they are now.
  virtual void close(Unit& unit, bool changed) = 0;
};

}  // namespace tessera
