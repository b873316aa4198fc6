#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/compute_device.h"
#include "sharding/gather/gather_log.h"
#include "sharding/gather/unit_keeper.h"
#include "sharding/layout/schedule.h"
#include "sharding/round_log.h"
#include "sharding/shard_source.h"
#include "sharding/unit.h"

namespace tessera {

struct ResidencyCounts {
  std::int64_t gathers = 0;  ///< of a unit, begun
  std::int64_t gathered_bytes = 0;
  double gather_seconds = 0;    ///< in gathers, waiting for other ranks and for the source included
  std::int64_t prefetched = 0;  ///< of these, begun before the unit was used
  std::int64_t releases = 0;
  std::int64_t overflow_slots = 0;  ///< slots beyond the plan, for operators that read many units at once
  std::int64_t overflow_bytes = 0;  ///< held by them now
  std::int64_t overflow_peak = 0;   ///< the most of it since `release_all`
};

/// Which units are gathered now, and where.
///
/// A unit is gathered by the first operator that reads it (`use`), early where the schedule knows the order. A slot is
/// taken from the unit whose next use is farthest away (which is optimal for a known order: Belady, 1966); a unit that
/// a running operator reads is pinned and never loses its slot.
///
/// Where parameters lie below memory, a gather first brings this rank's part from a ShardSource to its place in the slot, and
/// begins with that when it is prefetched; the all-gather follows when the unit is wanted. Ranks that share memory have the
/// slots together (Placement::shared): there each brings its part to the one slot, and the all-gather is a meeting. They
/// choose slots alike, since they use units in the same order.
///
/// Where units are rounded on the wire (PlanInput::gathers), every rank has the rounded parameters, of its own part too. What `hold` asks for
/// is exact: it is gathered once more, and given up when it is used next.
///
/// One thread at a time: the thread that runs forward and backward. Every rank must use units in the same order, since
/// gathering is a collective; a transport that sees a difference reports both units.
class Residency final : public UnitKeeper {
 public:
  /// `slots`: memory for the plan's slots; empty where units stay in their parameter memory (keep_gathered).
  /// `on_failure` hears of a gather that failed inside an operator (see `use_or_poison`).
  /// `log` hears of every gather. `source`: of the shards, where they are not in memory; outlives this.
  Residency(const MemoryPlan& plan, std::vector<Unit*> units, Collectives& group, Arena slots, ComputeDevice device,
            GatherLog& log, OnFailure on_failure, ShardSource* source = nullptr);
  ~Residency();

  /// Gathers `unit` if need be, waits for it, pins it, and prefetches what follows. Pair with `unpin`.
  void use(Unit& unit) override;
  /// Outside the schedule, beyond the plan's slots if they are taken.
  void hold(Unit& unit) override;
  void drop(Unit& unit) override;

  /// From now on gathered values must be, when they are given up, what they were when they came (unless
  /// Unit::gathered_hash is 0): else tessera::Error (64). On the CPU.
  void check_values() { checks_values_ = true; }
  /// Throws as above for what is gathered now. No-op without check_values.
  void expect_values() const;

  /// From now on `rounds` hears of every use by which the schedule goes. It outlives this.
  void tell(RoundLog& rounds) { rounds_ = &rounds; }

  /// A round is forward and backward of one microbatch.
  void end_round() {
    schedule_.end_round();
    last_ = nullptr;  // the next round's first use is an entry of its record, though it were of the same unit
  }
  /// Begins the next round's first gathers, where the transport goes on with them by itself: before the program comes to its forward.
  /// Between rounds; all ranks call it.
  void gather_ahead() {
    if (group_.gathers_in_background()) prefetch();
  }
  /// The shards have changed: nothing gathered is valid any more. REQUIRES: no unit is pinned.
  void release_all();
  /// A guard ended that had `unit` pinned: with check_values its memory is filled with NaN where another unit may get it, so that a
  /// program finds the pointers and arrays that it kept. No-op without check_values, and while the unit is pinned.
  void spoil(Unit& unit);
  /// Gives back what is held beyond the plan, unless a unit in it is pinned. With check_values it stays: what was kept of it can be read,
  /// and is NaN.
  void give_back_overflow();

  const Schedule& schedule() const { return schedule_; }
  const ResidencyCounts& counts() const { return counts_; }

 private:
  struct Slot {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
    Unit* holder = nullptr;
    int reserved_for = -1;  ///< unit index, or -1: shared
    Arena overflow;         ///< owns the memory of a slot beyond the plan; given back at the end of the step
  };

  void gather(Unit& unit);
  void bring_part(Unit& unit);
  static std::byte* own_part(const FlatGroup& group);
  void start_all_gather(Unit& unit);
  WireForm form_of(const Unit& unit) const {
    return is_exact_[unit.index] != 0 ? WireForm::kPlain : plan_.input().gathers;
  }
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
  ShardSource* const source_;
  Arena memory_;
  std::vector<Slot> slots_;                 ///< the root's, the shared ones, those beyond the plan
  std::vector<int> free_slots_;             ///< of the shared ones
  std::vector<std::vector<Work>> pending_;  ///< by unit index
  std::vector<char> is_exact_;              ///< by unit index: it was gathered for `hold`, and is not rounded
  std::vector<char> is_coming_;             ///< by unit index: its part, from the source
  Schedule schedule_;
  RoundLog* rounds_ = nullptr;
  const int exceptions_at_start_ = std::uncaught_exceptions();
  Unit* last_ = nullptr;
  bool warned_ = false;
  bool checks_values_ = false;
  ResidencyCounts counts_;
};

}  // namespace tessera
