#pragma once

// See docs/glossary.md: unit.

#include <vector>

#include "sharding/unit.h"

namespace tessera {

/// Memory for the sums of a unit's gradients from its reduction to its update, where they have none of their own
/// (offloaded gradients). Throws tessera::Error (74) where they cannot be read, or could not be written.
class GradientStore {
 public:
  virtual ~GradientStore() = default;

  /// Announces that the unit's sums are opened soon, and added to.
  virtual void expect(const Unit& unit) = 0;
  /// Gives the sums memory until `close`, and points FlatGroup::gradient of the groups that train there. They have the
  /// values that they had when they were closed last if `has_sum`; else any values. A unit that is open already is
  /// opened once more, and closed as often.
  virtual void open(Unit& unit, bool has_sum) = 0;
  /// Ends an `open`. `changed`: the present values are kept.
  virtual void close(Unit& unit, bool changed) = 0;
  /// An update begins, and opens the sums of these units in this order.
  virtual void begin_update(std::vector<int> units) = 0;
};

}  // namespace tessera
