#pragma once

// See docs/glossary.md: carrier, lease, unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "offload/file_tier.h"
#include "sharding/carrier.h"
#include "sharding/unit.h"

namespace tessera {

/// Offloads the CPU's sums of gradients to disk. Each unit that trains, except the root unit, has one record
/// (RecordPlan::gradients). Reductions write sums to the records' own memory. For updates the records are read ahead.
/// TrainingMemory owns it; the reducer and the step call it, one thread at a time.
///
/// The calls of Carrier take a unit's index as the number of a record. A lease makes FlatGroup::gradient of the unit's
/// groups point to the unit's sums. A lease of the root unit has no memory and changes nothing. A unit may have several
/// leases at once, and the last one that ends gives the record back.
class GradientRecords final : public Carrier {
 public:
  /// `files`: one record for each unit that trains, in the order of units, without the root unit, whose sums stay in
  /// memory.
  GradientRecords(std::unique_ptr<FileTier> files, const std::vector<std::unique_ptr<Unit>>& units);

  void announce(std::span<const std::int64_t> units) override;
  void flush() override { order_.clear(); }

  /// Returns the bytes moved since the records were made, and how long this rank waited for them.
  TierCounters counters() const { return files_->counters(); }
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(files_->record_memory_bytes()); }
  std::string describe() const { return files_->describe(); }

 private:
  /// The state of one unit.
  struct Entry {
    Unit* unit = nullptr;
    std::int64_t record = -1;          ///< the unit's record in files; -1 if the unit trains nothing or is the root
    int leases = 0;                    ///< number of leases that the unit has now
    bool changed = false;              ///< whether the unit's sums changed since the first of the present leases began
    std::span<std::byte> memory = {};  ///< the unit's gradient sums, while it has leases
  };
  std::span<std::byte> take(std::int64_t unit, LeaseUse use) override;
  void give_back(std::int64_t unit, bool changed) override;
  void drop(std::int64_t) noexcept override {}  // nothing is read or written after a failure
  Entry& entry(std::int64_t unit) { return entries_[static_cast<std::size_t>(unit)]; }
  void fetch_next();

  const std::unique_ptr<FileTier> files_;
  std::vector<Entry> entries_;       ///< [unit]
  std::vector<std::int64_t> order_;  ///< announced units that were not acquired yet; the last one first
};

}  // namespace tessera
