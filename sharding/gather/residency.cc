#include "sharding/gather/residency.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/torch/tensor_on.h"
#include "sharding/unrecorded.h"
#include "sharding/value_hash.h"
#include "tessera/span.h"

namespace tessera {
namespace {

void expect_values_of(const Unit& unit, c10::Device device) {
  if (unit.gathered_hash == 0 || unit.gathered_hash == hash_of_gathered(unit, device)) return;
  throw Error(ExitCode::kUsage, "unit " + unit.name +
                                    ": its gathered parameters were written through .data() or a raw pointer, and the "
                                    "write is lost (\"check.values\"). [T0623] hint: write under " +
                                    say(phrases::kWriteGuard));
}

}  // namespace
// Gathers units, and releases them.
//
// `use` and `hold` gather a released unit (`gather`). They choose a slot for it (`find_slot`; `add_overflow_slot` if no
// slot is free). If there is a Carrier, it brings this rank's part (`bring_part`). Then they start the all-gathers of
// the unit's groups (`start_all_gather`). `wait` waits for these all-gathers and attaches the parameters. `release`
// takes the memory away again: when another unit takes the slot, after a step (`release_all`), or if an exact unit must
// be rounded again. `prefetch` gathers the units that come next in the schedule, as long as it finds a slot without
// evicting a unit that is needed earlier.

Residency::Residency(const MemoryPlan& plan, std::vector<Unit*> units, Collectives& group, SlotMemory memory,
                     GatherLog& log, OnFailure on_failure)
    : UnitKeeper(std::move(on_failure)),
      plan_(plan),
      units_(std::move(units)),
      group_(group),
      device_(memory.device),
      log_(log),
      parts_(memory.parts),
      secondary_(std::move(memory.secondary)),
      memory_(std::move(memory.slots)),
      each_(units_.size()),
      schedule_(static_cast<int>(units_.size()), static_cast<std::size_t>(plan.placement().prefetch), /*uncounted=*/0) {
  if (!plan_.placement().keep_gathered) {
    slots_.push_back({memory_.take(units_[0]->gathered_bytes()), units_[0]->gathered_bytes(), nullptr, 0, {}});
    for (std::int64_t i = 0; i < plan_.slots().shared_slots; ++i) {
      slots_.push_back({memory_.take(plan_.slots().slot_bytes), plan_.slots().slot_bytes, nullptr, -1, {}});
    }
    for (std::int64_t i = plan_.slots().shared_slots; i > 0; --i) free_slots_.push_back(static_cast<int>(i));
    memory_.expect_full();
  }
  for (Unit* unit : units_) unit->watch(this, /*lends=*/true);
}

/// Waits for gathers that were begun ahead of use, since they may still be writing to the slots. During an exception it
/// waits only for work that does not depend on other ranks, since other ranks perhaps never make those gathers.
Residency::~Residency() {
  for (const Unit* unit : units_) {
    if (!of(*unit).is_coming) continue;
    try {
      parts_->acquire(unit->index, LeaseUse::kRead).give_back();
    } catch (const std::exception& error) {
      log_error("unit " + unit->name + ": " + error.what());
    }
  }
  if (std::uncaught_exceptions() == exceptions_at_start_) {
    for (OfUnit& each : each_) {
      for (Work& work : each.pending) work.wait().IgnoreError();
    }
  }
  for (Unit* unit : units_) unit->watch(nullptr);
}

void Residency::use(Unit& unit) {
  const bool is_held = unit.pins() > 0;
  unit.pin();
  if (!is_held && std::exchange(of(unit).is_exact, false) && unit.state() != Unit::State::kReleased) release(unit);
  // Perhaps only some ranks read a unit that a guard holds. So such reads must not advance the schedule, by which all
  // ranks gather ahead.
  if ((is_held || &unit == last_) && unit.state() == Unit::State::kGathered) {
    // The unit that an evaluation used last may be the first one of a microbatch.
    if (rounds_ && !is_held && rounds_->has_nothing()) rounds_->announce_and_add(unit.index);
    return;
  }
  if (rounds_) {
    if (last_ && last_ != &unit && last_->pins() > 0) rounds_->announce_and_add(RoundLog::kBesides);
    rounds_->announce_and_add(unit.index);
  }
  last_ = &unit;
  schedule_.use(unit.index);
  const std::int64_t overflows = counts_.overflow_slots;
  if (unit.state() == Unit::State::kReleased) gather(unit);
  if (unit.state() == Unit::State::kGathering) wait(unit);
  if (counts_.overflow_slots > overflows) warn_of_overflow(unit);
  prefetch();
}

void Residency::hold(Unit& unit) {
  if (rounds() && !of(unit).is_exact) {
    if (unit.pins() > 0) {
      throw Error(ExitCode::kUsage, "unit " + unit.name +
                                        ": an operator reads it, rounded as \"compression.gathers\" or \"secondary\" "
                                        "says, and exact values cannot take their place. [T0624] hint: open " +
                                        say(phrases::kGuard) + " outside of forward and backward");
    }
    if (unit.state() != Unit::State::kReleased) release(unit);
    of(unit).is_exact = true;
  }
  unit.pin();
  if (unit.state() == Unit::State::kReleased) gather(unit);
  if (unit.state() == Unit::State::kGathering) wait(unit);
}

void Residency::drop(Unit& unit) {
  if (unit.pins() == 0 && unit.state() != Unit::State::kReleased) release(unit);
  if (secondary_) secondary_->forget(unit);
}

void Residency::gather(Unit& unit) {
  for_each_parameter(unit, &expect_in_place);
  const bool in_place = plan_.placement().keep_gathered;
  std::byte* memory = nullptr;
  if (!in_place) {
    const int slot = find_slot(unit, /*early=*/false);
    take(slot < 0 ? add_overflow_slot(unit) : slot, unit);
    memory = slots_[unit.slot].memory;
  }
  unit.become(Unit::State::kGathering);
  schedule_.hold(unit.index);
  const Span span("all_gather", unit.name, &counts_.gather_seconds);
  if (!latencies_.empty()) of(unit).begun = clock_.begin();
  log_.note_gather(unit.index);
  ++counts_.gathers;
  counts_.gathered_bytes += unit.gathered_bytes();
  for (auto& group : unit.groups) {
    const std::int64_t begin = group->parameter_part.offset * group->element_bytes();
    group->full = in_place ? group->shard - begin : memory;
    if (!in_place) memory += group->gathered_bytes();
  }
  parts_ ? bring_part(unit) : start_all_gather(unit);
}

void Residency::bring_part(Unit& unit) {
  // Other ranks may still read the earlier content of the common slot.
  if (plan_.placement().shared) throw_if_error(group_.barrier(unit.name).wait());
  of(unit).is_coming = true;
  const std::int64_t index = unit.index;
  parts_->announce({&index, 1});
}

void Residency::start_all_gather(Unit& unit) {
  const bool from_copy = secondary_ && secondary_->has(unit) && !of(unit).is_exact;
  of(unit).is_from_copy = from_copy;
  if (from_copy) return secondary_->start(unit, of(unit).pending);
  for (auto& group : unit.groups) {
    const std::byte* const part = parts_ ? group->part_in_full() : group->shard;
    const std::int64_t bytes = group->parameter_part.numel * group->element_bytes();
    of(unit).pending.push_back(
        group_.all_gather(unit.name, part, group->full, bytes, {.dtype = group->dtype, .form = form_of(unit)}));
  }
}

void Residency::wait(Unit& unit) {
  const Span span("wait", unit.name, &counts_.gather_seconds);
  if (std::exchange(of(unit).is_coming, false)) {
    parts_->acquire(unit.index, LeaseUse::kRead).give_back();
    start_all_gather(unit);
  }
  {
    const Timed timed(device_.waits);
    for (Work& work : of(unit).pending) throw_if_error(work.wait());
    if (secondary_ && !of(unit).is_exact) fill_from_copy(unit);
  }
  of(unit).pending.clear();
  // A gather that was under way when timing began is not counted.
  if (!latencies_.empty()) clock_.end(of(unit).begun, latencies_[unit.index]);
  unit.become(Unit::State::kGathered);
  for (auto& group : unit.groups) group->attach(group->full);
  if (checks_values_) unit.gathered_hash = hash_of_gathered(unit, device_.device);
}

/// Completes a gather over the whole axis, which fills the second copy, or a gather from that copy.
void Residency::fill_from_copy(Unit& unit) {
  if (!of(unit).is_from_copy) secondary_->keep(unit);
  secondary_->finish(unit);
}

void Residency::release(Unit& unit) {
  if (unit.state() == Unit::State::kGathering) wait(unit);
  if (checks_values_) expect_values_of(unit, device_.device);
  for (auto& group : unit.groups) group->attach(nullptr);
  unit.become(Unit::State::kReleased);
  of(unit).is_exact = false;
  schedule_.give_up(unit.index);
  ++counts_.releases;
  if (unit.slot < 0) return;
  slots_[unit.slot].holder = nullptr;
  if (unit.slot > 0 && unit.slot <= plan_.slots().shared_slots) free_slots_.push_back(unit.slot);
  unit.slot = -1;
}

void Residency::expect_values() const {
  if (!checks_values_) return;
  for (const Unit* unit : units_) {
    if (unit->state() == Unit::State::kGathered) expect_values_of(*unit, device_.device);
  }
}

void Residency::take(int slot, Unit& unit) {
  if (Unit* holder = slots_[slot].holder) release(*holder);
  if (!free_slots_.empty() && free_slots_.back() == slot) free_slots_.pop_back();
  slots_[slot].holder = &unit;
  unit.slot = slot;
}

void Residency::prefetch() {
  for (int index = schedule_.next_missing(); index >= 0; index = schedule_.next_missing()) {
    Unit& unit = *units_[index];
    if (!plan_.placement().keep_gathered && find_slot(unit, /*early=*/true) < 0) return;
    gather(unit);
    ++counts_.prefetched;
  }
}

bool Residency::fits(const Unit& unit, const Slot& slot) const {
  return slot.reserved_for >= 0 ? slot.reserved_for == unit.index : slot.bytes >= unit.gathered_bytes();
}

/// Returns an empty slot or, if there is none, the slot whose unit is needed last; -1 if all slots are pinned. An early
/// gather may evict only a unit that is needed later than the unit to be gathered.
int Residency::find_slot(const Unit& unit, bool early) {
  if (!slots_[0].holder && fits(unit, slots_[0])) return 0;
  if (!free_slots_.empty() && fits(unit, slots_[free_slots_.back()])) return free_slots_.back();
  for (std::size_t i = static_cast<std::size_t>(plan_.slots().shared_slots) + 1; i < slots_.size(); ++i) {
    if (!slots_[i].holder && fits(unit, slots_[i])) return static_cast<int>(i);
  }
  const auto may_go = [&](int index) {
    const Unit& holder = *units_[index];
    return holder.pins() == 0 && holder.slot >= 0 && fits(unit, slots_[holder.slot]);
  };
  const int victim =
      early ? schedule_.farthest_held(schedule_.distance(unit.index), may_go) : schedule_.farthest_held(may_go);
  return victim < 0 ? -1 : units_[victim]->slot;
}

void Residency::warn_of_overflow(const Unit& unit) {
  if (warned_) return;
  warned_ = true;
  log_warning("unit " + unit.name +
              ": an operator reads more units at once than the plan has slots for; adding a slot " +
              "outside the plan. [T0625] hint: raise \"prefetch\", or let one unit hold what is read together");
}

int Residency::add_overflow_slot(const Unit& unit) {
  ++counts_.overflow_slots;
  Slot slot{nullptr, unit.gathered_bytes(), nullptr, -1,
            plan_.placement().shared ? Arena::common("overflow slot", unit.gathered_bytes(), group_)
                                     : Arena::plain("overflow slot", unit.gathered_bytes(), device_.device)};
  slot.memory = slot.overflow.take(slot.bytes);
  counts_.overflow_bytes += slot.bytes;
  counts_.overflow_peak = std::max(counts_.overflow_peak, counts_.overflow_bytes);
  slots_.push_back(std::move(slot));
  return static_cast<int>(slots_.size()) - 1;
}

void Residency::release_all() {
  last_ = nullptr;
  for (Unit* unit : units_) {
    unit->gathered_hash = 0;  // the step has changed values that are gathered in place
    TORCH_INTERNAL_ASSERT(unit->pins() == 0, "unit ", unit->name, " is still in use at the end of a step");
    if (unit->state() != Unit::State::kReleased) release(*unit);
  }
  if (secondary_) secondary_->forget_all();
  give_back_overflow();
  counts_.overflow_peak = counts_.overflow_bytes;
}

void Residency::spoil(Unit& unit) {
  if (!checks_values_ || unit.slot < 0 || unit.pins() > 0 || unit.state() == Unit::State::kReleased) return;
  const Slot& slot = slots_[unit.slot];
  release(unit);
  if (plan_.placement().shared)
    throw_if_error(group_.barrier(unit.name).wait());  // other ranks may still read the common slot
  const Unrecorded unrecorded;
  tensor_on(device_.device, slot.memory, static_cast<std::size_t>(unit.gathered_bytes()))
      .fill_(0xff);  // these bits are NaN in every floating type
}

/// Gives back slots beyond the plan, from the last one on, so that the number of a slot that a unit holds does not
/// change.
void Residency::give_back_overflow() {
  while (!checks_values_ && !slots_.empty() && slots_.back().overflow.bytes() > 0) {
    Unit* holder = slots_.back().holder;
    if (holder && holder->pins() > 0) return;
    if (holder) release(*holder);
    counts_.overflow_bytes -= slots_.back().bytes;
    slots_.pop_back();
  }
}

}  // namespace tessera
