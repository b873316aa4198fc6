#pragma once

// See docs/glossary.md: carrier, placement, residency, slot, unit.

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "runtime/base/metrics/latency_histogram.h"
#include "runtime/border/throw.h"
#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/carrier.h"
#include "sharding/compute_device.h"
#include "sharding/gather/call_clock.h"
#include "sharding/gather/gather_log.h"
#include "sharding/gather/secondary_shards.h"
#include "sharding/gather/unit_keeper.h"
#include "sharding/layout/schedule.h"
#include "sharding/round_log.h"
#include "sharding/unit.h"

namespace tessera {

/// Counts of the actions of a Residency so far.
struct ResidencyCounts {
  std::int64_t gathers = 0;  ///< number of gathers of a unit that were begun
  std::int64_t gathered_bytes = 0;
  double gather_seconds = 0;    ///< time spent in gathers, including waits for other ranks and for the Carrier
  std::int64_t prefetched = 0;  ///< number of gathers that were begun before the unit was used
  std::int64_t releases = 0;
  std::int64_t overflow_slots = 0;  ///< number of slots beyond the plan, for operators that read many units at once
  std::int64_t overflow_bytes = 0;  ///< bytes that overflow slots hold now
  std::int64_t overflow_peak = 0;   ///< largest number of overflow bytes since `release_all`
};

/// The memory of gathered units, and the Carrier that brings this rank's parts of the units.
struct SlotMemory {
  Arena slots;  ///< the plan's slots; empty if units stay in their parameter memory (keep_gathered)
  ComputeDevice device;
  /// Brings this rank's parts, numbered by unit, to FlatGroup::full; null if they are in memory. It must outlive the
  /// Residency.
  Carrier* parts = nullptr;
  std::unique_ptr<SecondaryShards> secondary = nullptr;  ///< the second copy of the parameters; null if there is none
};

/// Manages which units are gathered, and in which slots. The Engine owns it, for strategies that shard parameters.
///
/// A unit is gathered when the first operator reads it (`use`), or earlier if the schedule has recorded the order
/// (prefetch). A slot is taken from the unit whose next use is farthest away, which is optimal for a known order
/// (Belady, 1966). A unit that a running operator reads is pinned and never loses its slot.
///
/// If parameters are offloaded, a gather first lets a Carrier bring this rank's part to its place in the slot. A
/// prefetch begins only this transfer, and the all-gather follows when the unit is used. Ranks that share memory also
/// share the slots (Placement::shared): each rank brings its part to the common slot, and the all-gather is only a
/// barrier. These ranks choose the same slots, since they use units in the same order.
///
/// If there is a second copy of the parameters (SecondaryShards), the first gather of a unit fills this copy. Until the
/// values change, later gathers are made from this copy, between the ranks that hold the copy together.
///
/// If units are rounded on the wire (PlannedWire::gathers) or in the second copy, every rank has rounded values of all
/// parameters, its own part included. For `hold`, however, a unit has exact values: it is gathered once more, and
/// released at its next use.
///
/// One thread at a time calls a Residency: the thread that runs forward and backward. Every rank must use units in the
/// same order, since a gather is a collective. A transport that notices a difference reports both units.
class Residency final : public UnitKeeper {
 public:
  /// `on_failure` is called for a gather that failed inside an operator (see `use_or_poison`). `log` records every
  /// gather.
  Residency(const MemoryPlan& plan, std::vector<Unit*> units, Collectives& group, SlotMemory memory, GatherLog& log,
            OnFailure on_failure);
  ~Residency();

  /// Gathers `unit` if necessary, waits for it, pins it, and prefetches the units that follow. Each call must be
  /// followed by `unpin`.
  void use(Unit& unit) override;
  /// Gathers, waits and pins as `use` does, but outside of the schedule. If all planned slots hold pinned units, it
  /// uses a slot beyond the plan.
  void hold(Unit& unit) override;
  void drop(Unit& unit) override;

  /// Checks values from now on: a gathered unit must have the same values when it is released as when it arrived
  /// (unless Unit::gathered_hash is 0). Otherwise the release throws tessera::Error (64). On a GPU each check waits for
  /// the device.
  void check_values() { checks_values_ = true; }
  /// Throws the error of check_values if a gathered unit has changed. It does nothing without check_values.
  void expect_values() const;

  /// From now on, announces to `rounds` every use that the schedule counts. `rounds` must outlive this object.
  void tell(RoundLog& rounds) { rounds_ = &rounds; }

  /// From now on, records in `latencies` how long each gather takes: from its beginning until its values have arrived
  /// and a caller has waited for them. `latencies` [unit] must outlive this object. `queue` is a GPU's clock for
  /// gathers; it is null on the CPU.
  void time_gathers(std::span<LatencyHistogram> latencies, QueueTimes* queue = nullptr) {
    latencies_ = latencies;
    clock_.use(queue);
    for (OfUnit& each : each_) each.begun = {};
  }

  /// It is called at the end of a round, which is the forward and backward of one microbatch.
  void end_round() {
    schedule_.end_round();
    last_ = nullptr;  // so the first use of the next round gets a separate entry, even for the same unit
  }
  /// Begins the first gathers of the next round before the program reaches its forward, if the transport makes gathers
  /// in the background. All ranks call it between rounds.
  void gather_ahead() {
    if (group_.gathers_in_background()) prefetch();
  }
  /// Releases all units, since the shards have changed and gathered values are no longer valid. REQUIRES: no unit is
  /// pinned.
  void release_all();
  /// It is called after the end of a guard that had pinned `unit`. If another unit may get the memory, the memory is
  /// filled with NaN, so that a program that kept pointers or arrays notices this. It does nothing without
  /// check_values, or while the unit is pinned.
  void spoil(Unit& unit);
  /// Gives back slots beyond the plan, from the last one on, up to the first slot whose unit is pinned. Under
  /// check_values they are kept, so that pointers into them can still be read, and show NaN.
  void give_back_overflow();

  const Schedule& schedule() const { return schedule_; }
  const ResidencyCounts& counts() const { return counts_; }

 private:
  struct Slot {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
    Unit* holder = nullptr;
    int reserved_for = -1;  ///< index of the unit for which the slot is reserved; -1: units share the slot
    Arena overflow;         ///< memory of a slot beyond the plan (see give_back_overflow)
  };

  /// The gather of one unit: the gather that is under way, or else the last gather.
  struct OfUnit {
    std::vector<Work> pending;
    bool is_exact = false;      ///< whether the gather was made for `hold`, and is not rounded
    bool is_coming = false;     ///< whether the Carrier is still bringing this rank's part
    bool is_from_copy = false;  ///< whether the gather is made from the second copy
    CallBegin begun;
  };

  OfUnit& of(const Unit& unit) { return each_[unit.index]; }
  const OfUnit& of(const Unit& unit) const { return each_[unit.index]; }
  void gather(Unit& unit);
  void bring_part(Unit& unit);
  void start_all_gather(Unit& unit);
  WireForm form_of(const Unit& unit) const { return of(unit).is_exact ? WireForm::kPlain : plan_.wire().gathers; }
  void fill_from_copy(Unit& unit);
  /// Returns whether the values that operators read are rounded, so that a guard must gather the exact values
  /// separately.
  bool rounds() const { return is_lossy(plan_.wire().gathers) || plan_.placement().secondary.is_rounded(); }
  void wait(Unit& unit);
  void release(Unit& unit);
  void prefetch();
  int find_slot(const Unit& unit, bool early);
  bool fits(const Unit& unit, const Slot& slot) const;
  int add_overflow_slot(const Unit& unit);
  void take(int slot, Unit& unit);
  void warn_of_overflow(const Unit& unit);

  const MemoryPlan& plan_;
  std::vector<Unit*> units_;
  Collectives& group_;
  const ComputeDevice device_;
  GatherLog& log_;
  Carrier* const parts_;
  const std::unique_ptr<SecondaryShards> secondary_;
  Arena memory_;
  std::vector<Slot> slots_;      ///< the root unit's slot, then the shared slots, then those beyond the plan
  std::vector<int> free_slots_;  ///< indices of shared slots that hold no unit
  std::vector<OfUnit> each_;     ///< one element for each unit, by its index
  Schedule schedule_;
  RoundLog* rounds_ = nullptr;
  std::span<LatencyHistogram> latencies_;  ///< empty if gathers are not timed
  CallClock clock_;
  const int exceptions_at_start_ = std::uncaught_exceptions();
  Unit* last_ = nullptr;
  bool warned_ = false;
  bool checks_values_ = false;
  ResidencyCounts counts_;
};

}  // namespace tessera
