#pragma once

// See docs/glossary.md: carrier, lease, slot, tier, unit.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "offload/file_tier.h"
#include "optim/device_kernels.h"
#include "sharding/carrier.h"
#include "sharding/unit.h"
#include "tessera/memory.h"

namespace tessera {

/// Offloads the sums of a GPU's gradients to pinned memory of its host or to files. Each unit that trains, except the
/// root unit, has one record (RecordPlan::gradients). Reductions write sums to slots on the GPU, and updates read them
/// from slots. TrainingMemory owns it; the thread of the step calls it.
///
/// The calls of Carrier take a unit's index as the number of a record. A lease makes FlatGroup::gradient of the unit's
/// groups point to the unit's slot. A lease of the root unit has no memory and changes nothing. A unit may have several
/// leases at once.
///
/// 1. A unit has a slot while it has a lease. If the sums were changed, they are copied to the host after the unit's
///    last lease, on a separate stream. Later work in the slot waits for that copy; the host waits for nothing.
/// 2. Sums that are needed again are copied back to a slot. They are copied one unit ahead if the order of units is
///    known. The copy waits for all work that is on the current stream when the copy is queued. The stream has already
///    waited for the last copy to this record, and for the copy of the slot's earlier content.
/// 3. Records in files are held in memory while they are copied, at most RecordPool::held at once. The host waits until
///    a record is read. The host puts the record back after the copy from the GPU has ended. It does so when another
///    record needs the memory, or when the same record is needed again.
class DeviceGradients final : public Carrier {
 public:
  /// `count` pieces of the GPU's memory, of `bytes` bytes each, one after another.
  struct Slots {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0, count = 0;
  };

  /// `tier`: one record for each unit that trains, in the order of units, without the root unit, whose sums stay on the
  /// GPU. `files`: the same tier if records lie in files, else null. If records lie in files, at most `held` records
  /// may be in use at once. `kernels` and the slots' memory must outlive this object.
  DeviceGradients(std::unique_ptr<RecordTier> tier, FileTier* files, std::int64_t held,
                  const std::vector<std::unique_ptr<Unit>>& units, DeviceKernels& kernels, const Slots& slots);
  /// Waits for the copies under way; a failure is logged.
  ~DeviceGradients() override;

  void announce(std::span<const std::int64_t> units) override;
  void flush() override { order_.clear(); }

  const Slots& slots() const { return slots_; }
  /// Returns the slot of a unit that has a lease; -1 if its sums stay on the GPU.
  int slot_of(const Unit& unit) const { return entries_[static_cast<std::size_t>(unit.index)].slot; }

  /// Returns the address of a unit's sums in the host's memory; the sums of its trainable groups follow each other. It
  /// is null if sums lie in files, and for the root unit. After the event `copied_out`, the memory holds the sums of
  /// the last lease. The host may write them until the next lease.
  float* sums_on_host(const Unit& unit) const;
  const std::shared_ptr<DeviceKernels::Mark>& copied_out(const Unit& unit) const {
    return entries_[static_cast<std::size_t>(unit.index)].left;
  }

  TierCounters counters() const { return tier_->counters(); }
  /// Returns the bytes that were copied so far, in each direction.
  const HostStepBytes& copied() const { return copied_; }
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(tier_->record_memory_bytes()); }
  std::string describe() const { return tier_->describe(); }

 private:
  using Mark = DeviceKernels::Mark;
  /// The state of one unit.
  struct Entry {
    Unit* unit = nullptr;
    std::int64_t record = -1;    ///< the unit's record in the tier; -1 if the unit trains nothing or is the root
    std::int64_t bytes = 0;      ///< number of bytes of the unit's sums
    int leases = 0;              ///< number of leases that the unit has now
    int slot = -1;               ///< the unit's slot, or -1
    bool changed = false;        ///< whether the unit's sums changed since the first of the present leases began
    std::byte* place = nullptr;  ///< the record's memory, where records lie in memory
    std::byte* held = nullptr;   ///< the memory of a record in files, while it is copied to the slot
    std::shared_ptr<Mark> came;  ///< the copy that filled the slot; null: no copy did
    std::shared_ptr<Mark> left;  ///< the last copy of the sums to the host
  };
  /// A record in files whose copy is under way.
  struct Leaving {
    std::int64_t record = -1;
    std::shared_ptr<Mark> mark;
    bool changed = false;
  };

  std::span<std::byte> take(std::int64_t unit, LeaseUse use) override;
  void give_back(std::int64_t unit, bool changed) override;
  void drop(std::int64_t) noexcept override {}  // nothing is copied after a failure
  Entry& entry(std::int64_t unit) { return entries_[static_cast<std::size_t>(unit)]; }
  void take_slot(Entry& entry);
  void give_up_brought();
  void bring(Entry& entry);
  std::byte* hold(const Entry& entry, bool overwrites);
  void let_go_oldest();
  void bring_next();

  const std::unique_ptr<RecordTier> tier_;
  FileTier* const files_;
  const std::size_t held_;
  DeviceKernels& kernels_;
  const Slots slots_;
  std::vector<Entry> entries_;  ///< [unit]
  std::deque<int> free_;        ///< free slots; the slot at the front was given back first
  /// [slot]: event of the copy from the slot to the host; null: the copy was joined
  std::vector<std::shared_ptr<Mark>> emptied_;
  std::size_t used_ = 0;         ///< number of held records that lie in files
  std::deque<Leaving> leaving_;  ///< held records that are put back when a copy has passed, oldest first
  std::shared_ptr<Mark> last_;   ///< the latest copy to the host
  /// announced units that were not acquired yet; the last one first
  std::vector<std::int64_t> order_;
  HostStepBytes copied_;
};

}  // namespace tessera
