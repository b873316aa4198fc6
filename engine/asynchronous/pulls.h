#pragma once

// See docs/glossary.md: unit.

#include <functional>
#include <utility>
#include <vector>

#include "engine/asynchronous/pulled_parameters.h"
#include "sharding/gather/unit_keeper.h"
#include "sharding/unit.h"

namespace tessera {

/// Pulls a unit of asynchronous training at the times at which a sharded unit would be gathered: when an operator of a
/// step, or a Gathered guard, first reads its parameters. ReplicaSync owns a Pulls while an Engine's operators are
/// watched.
class Pulls final : public UnitKeeper {
 public:
  /// `on_pulled` is called with a unit whose values have changed. The object keeps a reference to `shards`.
  Pulls(std::vector<Unit*> units, PulledParameters& shards, std::function<void(Unit&)> on_pulled, OnFailure on_failure)
      : UnitKeeper(std::move(on_failure)), units_(std::move(units)), shards_(shards), on_pulled_(std::move(on_pulled)) {
    for (Unit* unit : units_) unit->watch(this);
  }
  ~Pulls() {
    for (Unit* unit : units_) unit->watch(nullptr);
  }
  Pulls(const Pulls&) = delete;
  Pulls& operator=(const Pulls&) = delete;

  void use(Unit& unit) override {
    unit.pin();
    if (shards_.pull(unit)) on_pulled_(unit);
  }
  void hold(Unit& unit) override { use(unit); }
  void drop(Unit&) override {}  // nothing to do, since no pull is under way between calls

 private:
  const std::vector<Unit*> units_;
  PulledParameters& shards_;
  const std::function<void(Unit&)> on_pulled_;
};

}  // namespace tessera
