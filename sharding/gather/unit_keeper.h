#pragma once

// See docs/glossary.md: publication, residency, unit.

#include <functional>
#include <utility>

#include "tessera/error.h"

namespace tessera {

class Unit;

/// Makes sure that a unit's parameters are in memory when they are read (Unit::watch). Residency and Publication
/// implement it. One thread at a time calls it: the thread that runs forward and backward.
class UnitKeeper {
 public:
  using OnFailure = std::function<void(const Error&)>;

  /// Waits until the values of `unit` are in memory, and pins them, since they are about to be read. Throws
  /// tessera::Error. Each call must be followed by `unpin`.
  virtual void use(Unit& unit) = 0;
  /// Does what `use` does, for the callback of an operator; a callback must not throw. If it fails, the unit is
  /// poisoned, so that the operator itself throws. A poisoned storage has only a text, so `on_failure` is called with
  /// the failure and its exit code.
  void use_or_poison(Unit& unit) noexcept;
  /// Waits for the values and pins them for code outside of operators. Throws tessera::Error. Each call must be
  /// followed by `unpin`.
  virtual void hold(Unit& unit) = 0;
  /// Ends a `use` or a `hold`.
  void unpin(Unit& unit);
  /// It is called when the values are about to change, or have changed. Afterwards no transfer of the unit is under
  /// way, and values that were gathered from other ranks are released, unless the unit is pinned.
  virtual void drop(Unit& unit) = 0;

 protected:
  /// `on_failure` is called inside an operator, for values that did not arrive.
  explicit UnitKeeper(OnFailure on_failure) : on_failure_(std::move(on_failure)) {}
  ~UnitKeeper() = default;

 private:
  const OnFailure on_failure_;
};

}  // namespace tessera
