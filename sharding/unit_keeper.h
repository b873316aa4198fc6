#pragma once

namespace tessera {

class Unit;

/// Sees to it that a unit's parameters are there when somebody reads them (Unit::watch). One thread at a time: the thread that runs
/// forward and backward.
class UnitKeeper {
 public:
  /// Before an operator that reads `unit`: waits until its values are there, and pins them. For an operator's callback, which must not
  /// throw: on failure the unit is poisoned, so that the operator itself throws. Pair with `unpin`.
  virtual void use_or_poison(Unit& unit) noexcept = 0;
  /// Has the values there and pins them, outside of operators. Throws tessera::Error. Pair with `unpin`.
  virtual void hold(Unit& unit) = 0;
  virtual void unpin(Unit& unit) = 0;
  /// The values are about to change, or have changed: none of them is on its way any more, and what this rank has only gathered is given
  /// up, unless it is pinned.
  virtual void drop(Unit& unit) = 0;

 protected:
  ~UnitKeeper() = default;
};

}  // namespace tessera
