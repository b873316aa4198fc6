#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "offload/file_tier.h"
#include "sharding/reduce/gradient_store.h"
#include "sharding/unit.h"

namespace tessera {

/// Offloads the CPU's sums of gradients to disk: one record for each unit but the root (MemoryPlan::gradient_records).
/// Reductions make sums in the records' own memory, and updates find them there, read ahead. TrainingMemory owns it;
/// the reducer and the step call it, one thread at a time. Throws tessera::Error (74, 65) where a record cannot be read
/// or written.
class GradientRecords final : public GradientStore {
 public:
  /// `files`: one record for each unit that trains, in the order of units, without the root, whose sums stay in memory.
  GradientRecords(std::unique_ptr<FileTier> files, const std::vector<std::unique_ptr<Unit>>& units);

  void expect(const Unit& unit) override;
  void open(Unit& unit, bool has_sum) override;
  void close(Unit& unit, bool changed) override;
  void begin_update(std::vector<int> units) override;

  /// Bytes moved since the records were made, and how long this rank stood still for them.
  TierCounters counters() const { return files_->counters(); }
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(files_->record_memory_bytes()); }
  std::string describe() const { return files_->describe(); }

 private:
  /// What is known about one unit.
  struct Entry {
    std::int64_t record = -1;  ///< its record; -1: it trains nothing, or is the root
    int opened = 0;            ///< how often it must still be closed
    bool changed = false;      ///< whether its sums changed since it was opened
  };
  Entry& entry(const Unit& unit) { return entries_[static_cast<std::size_t>(unit.index)]; }
  void fetch_next();

  const std::unique_ptr<FileTier> files_;
  std::vector<Entry> entries_;  ///< [unit]
  std::vector<int> order_;      ///< units that the update has still to open; the last one first
};

}  // namespace tessera
