#pragma once

#include <functional>
#include <utility>

#include "tessera/error.h"

namespace tessera {

class Unit;

/// Sees to it that a unit's parameters are there when somebody reads them (Unit::watch). One thread at a time: the thread that runs
/// forward and backward.
class UnitKeeper {
 public:
  using OnFailure = std::function<void(const Error&)>;

  /// Waits until the values of `unit` are there, and pins them: it is about to be read. Throws tessera::Error. Pair with `unpin`.
  virtual void use(Unit& unit) = 0;
  /// As `use`, but for an operator's callback, which must not throw. On failure the unit is poisoned, so that the operator
  /// itself throws. A poisoned storage carries a text only, so `on_failure` is told of the failure with its exit code.
  void use_or_poison(Unit& unit) noexcept;
  /// Has the values there and pins them, outside of operators. Throws tessera::Error. Pair with `unpin`.
  virtual void hold(Unit& unit) = 0;
  void unpin(Unit& unit);
  /// The values are about to change, or have changed: none of them is on its way any more, and what this rank has only gathered is given
  /// up, unless it is pinned.
  virtual void drop(Unit& unit) = 0;

 protected:
  /// `on_failure` hears of values that did not come, inside an operator.
  explicit UnitKeeper(OnFailure on_failure) : on_failure_(std::move(on_failure)) {}
  ~UnitKeeper() = default;

 private:
  const OnFailure on_failure_;
};

}  // namespace tessera
