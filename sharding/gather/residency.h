#pragma once

// See docs/glossary.md: carrier, placement, residency, slot, unit.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
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

/// Counts of what a Residency has done so far.
struct ResidencyCounts {
  std::int64_t gathers = 0;  ///< number of gathers of a unit that were begun
  std::int64_t gathered_bytes = 0;
  double gather_seconds = 0;    ///< spent in gathers, including waits for other ranks and for the source
  std::int64_t prefetched = 0;  ///< gathers that were begun before the unit was used
  std::int64_t releases = 0;
  std::int64_t overflow_slots = 0;  ///< slots beyond the plan, for operators that read many units at once
  std::int64_t overflow_bytes = 0;  ///< bytes that overflow slots hold now
  std::int64_t overflow_peak = 0;   ///< largest overflow since `release_all`
};

/// The memory of gathered units, and the Carrier that brings this rank's parts of the units.
struct SlotMemory {
  Arena slots;  ///< the plan's slots; empty where units stay in their parameter memory (keep_gathered)
  ComputeDevice device;
  /// Brings this rank's parts, numbered by unit, to FlatGroup::full where they are not in memory. It outlives the
  /// Residency.
  Carrier* parts = nullptr;
  std::unique_ptr<SecondaryShards> secondary = nullptr;  ///< the second copy of the parameters; null: there is none
};

/// Knows which units are gathered now, and in which slots. The Engine owns it, for strategies that shard parameters.
///
/// A unit is gathered by the first operator that reads it (`use`), or earlier where the schedule knows the order
/// (prefetch). A slot is taken from the unit whose next use is farthest away (which is optimal for a known order:
/// Belady, 1966); a unit that a running operator reads is pinned and never loses its slot.
///
/// Where parameters are offloaded, a gather first brings this rank's part from a Carrier to its place in the
/// slot. A prefetch begins only this transfer, and the all-gather follows when the unit is used. Ranks that share
/// memory share the slots too (Placement::shared): each rank brings its part to the one slot, and the all-gather is
/// only a barrier. They choose the same slots, since they use units in the same order.
///
/// Where there is a second copy of the parameters (SecondaryShards), the first gather of a unit fills it. Later gathers
/// read from this copy, between the ranks that hold it together, until the values change.
///
/// Where units are rounded on the wire (PlannedWire::gathers) or in the second copy, every rank has rounded values of
/// all parameters, its own part included. A unit that `hold` asks for is exact: it is gathered once more, and released
/// when it is used next.
///
/// One thread at a time calls it: the thread that runs forward and backward. Every rank must use units in the same
/// order, since gathering is a collective; a transport that sees a difference reports both units.
class Residency final : public UnitKeeper {
 public:
  /// `on_failure` hears of a gather that failed inside an operator (see `use_or_poison`). `log` hears of every gather.
  Residency(const MemoryPlan& plan, std::vector<Unit*> units, Collectives& group, SlotMemory memory, GatherLog& log,
            OnFailure on_failure);
  ~Residency();

  /// Gathers `unit` if necessary, waits for it, pins it, and prefetches what follows. Pair with `unpin`.
  void use(Unit& unit) override;
  /// Gathers, waits and pins as `use` does, but outside the schedule, and in a slot beyond the plan if all planned ones
  /// are taken.
  void hold(Unit& unit) override;
  void drop(Unit& unit) override;

  /// Checks values from now on: a gathered unit must have the same values when it is released as when it came (unless
  /// Unit::gathered_hash is 0). Otherwise a tessera::Error (64) is thrown. On a GPU each check waits for the device.
  void check_values() { checks_values_ = true; }
  /// Throws the error of check_values if a gathered unit has changed. It does nothing without check_values.
  void expect_values() const;

  /// Tells `rounds`, from now on, of every use that the schedule counts. `rounds` must outlive this object.
  void tell(RoundLog& rounds) { rounds_ = &rounds; }

  /// From now on, notes in `latencies` how long each gather takes from its beginning until it has arrived and somebody
  /// has waited for it. `latencies` [unit] must outlive this object. `queue`: a GPU's clock for gathers; else null.
  void time_gathers(std::span<LatencyHistogram> latencies, QueueTimes* queue = nullptr) {
    latencies_ = latencies;
    clock_.use(queue);
    for (OfUnit& each : each_) each.begun = {};
  }

  /// Ends a round, which is the forward and backward of one microbatch.
  void end_round() {
    schedule_.end_round();
    last_ = nullptr;  // the first use of the next round then gets its own entry, even for the same unit
  }
  /// Begins the next round's first gathers before the program reaches that round's forward, where the transport carries
  /// gathers by itself. It is called between rounds, by all ranks.
  void gather_ahead() {
    if (group_.gathers_in_background()) prefetch();
  }
  /// Releases all units: the shards have changed, so nothing gathered is valid any more. REQUIRES: no unit is pinned.
  void release_all();
  /// This is called when a guard ended that had `unit` pinned. The unit's memory is filled with NaN where another unit
  /// may get it, so that a program notices pointers and arrays that it kept. It does nothing without check_values, or
  /// while the unit is pinned.
  void spoil(Unit& unit);
  /// Gives back slots beyond the plan, unless a unit in one is pinned. Under check_values they stay: pointers into them
  /// can still be read, and show NaN.
  void give_back_overflow();

  const Schedule& schedule() const { return schedule_; }
  const ResidencyCounts& counts() const { return counts_; }

 private:
  struct Slot {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
    Unit* holder = nullptr;
    int reserved_for = -1;  ///< unit index; -1: units share the slot
    Arena overflow;         ///< owns the memory of a slot beyond the plan; given back when the step ends
  };

  /// The gather of one unit: the one that is under way, or else the last one.
  struct OfUnit {
    std::vector<Work> pending;
    bool is_exact = false;      ///< the gather was made for `hold`, and is not rounded
    bool is_coming = false;     ///< the Carrier is still bringing this rank's part
    bool is_from_copy = false;  ///< the gather is from the second copy
    CallBegin begun;
  };

  OfUnit& of(const Unit& unit) { return each_[unit.index]; }
  const OfUnit& of(const Unit& unit) const { return each_[unit.index]; }
  void gather(Unit& unit);
  void bring_part(Unit& unit);
  void start_all_gather(Unit& unit);
  WireForm form_of(const Unit& unit) const { return of(unit).is_exact ? WireForm::kPlain : plan_.wire().gathers; }
  void fill_from_copy(Unit& unit);
  /// Returns whether the values that operators read are rounded, so that a guard gathers the unrounded values by
  /// itself.
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
  std::vector<Slot> slots_;      ///< the root's slot, the shared ones, then those beyond the plan
  std::vector<int> free_slots_;  ///< indices of shared slots that hold nothing
  std::vector<OfUnit> each_;     ///< one for each unit, by its index
  Schedule schedule_;
  RoundLog* rounds_ = nullptr;
  std::span<LatencyHistogram> latencies_;  ///< empty: gathers are not timed
  CallClock clock_;
  const int exceptions_at_start_ = std::uncaught_exceptions();
  Unit* last_ = nullptr;
  bool warned_ = false;
  bool checks_values_ = false;
  ResidencyCounts counts_;
};

}  // namespace tessera
