#pragma once

// See docs/glossary.md: carrier, lease, residency, unit.

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/memory/records/tier_carrier.h"
#include "sharding/carrier.h"
#include "sharding/unit.h"

namespace tessera {

/// Brings this rank's parts of units to the CPU's gathered buffers, from their records on disk
/// (FlatGroup::parameters_below) or from memory. The residency calls it when it gathers a unit, on the thread that runs
/// forward and backward.
///
/// The calls of Carrier take a unit's index as the number of a record. `announce` begins to bring parts to
/// FlatGroup::part_in_full, which begins at a page boundary; parts of other units may still be under way. `acquire`
/// waits for one unit's parts. If it throws, no copy of the unit is under way any more. A lease has no memory, since
/// the gathered buffer belongs to the residency.
class PartCarrier : public Carrier {
 public:
  /// `units` must outlive this object.
  PartCarrier(const std::vector<std::unique_ptr<Unit>>& units, std::shared_ptr<TierCarrier> records)
      : records_(std::move(records)), units_(units) {}

  void announce(std::span<const std::int64_t> units) override;
  void flush() override {}

 protected:
  /// Begins to copy a group's records to `memory`, the place of the first element of the first record.
  void start_copies(const FlatGroup& group, std::byte* memory) const;

  const std::shared_ptr<TierCarrier> records_;

 private:
  std::span<std::byte> take(std::int64_t unit, LeaseUse use) override;
  void give_back(std::int64_t, bool) override {}
  void drop(std::int64_t) noexcept override {}
  /// Begins to bring the parts of one group.
  virtual void start(const FlatGroup& group);

  const std::vector<std::unique_ptr<Unit>>& units_;
};

}  // namespace tessera
