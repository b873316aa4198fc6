#include "planner/script/gather_script.h"

#include <cstddef>

#include "planner/script/form_cost.h"
#include "sharding/layout/placement.h"

namespace tessera {

GatherScript::GatherScript(const MemoryPlan& plan)
    : plan_(plan),
      is_needed_(plan.gathers() && plan.placement().mesh.shard_size > 1),
      units_(plan.units().size()),
      holders_(static_cast<std::size_t>(plan.slots().shared_slots) + 1, -1),
      schedule_(static_cast<int>(units_.size()), static_cast<std::size_t>(plan.placement().prefetch), /*uncounted=*/0) {
}

void GatherScript::use(int index, ScriptWriter& writer) {
  if (!is_needed_ || (index == last_ && unit(index).state == State::kGathered)) return;
  last_ = index;
  schedule_.use(index);
  if (unit(index).state == State::kReleased) gather(index, writer);
  if (unit(index).state == State::kGathering) wait(index, writer);
  prefetch(writer);
}

/// The last operation of a backward does not always read its unit's parameters (that of an embedding does not). The
/// first use in the next forward is therefore counted as a new use, even if the same unit was used last.
void GatherScript::end_round() {
  last_ = -1;
  schedule_.end_round();
}

void GatherScript::gather_ahead(ScriptWriter& writer) {
  if (is_needed_ && writer.links(Axis::kShard).gathers_in_background && !plan_.placement().is_queued) prefetch(writer);
}

void GatherScript::release_all(ScriptWriter& writer) {
  last_ = -1;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].state != State::kReleased) release(static_cast<int>(i), writer);
  }
  for (Unit& unit : units_) unit.has_copy = false;
}

void GatherScript::gather(int index, ScriptWriter& writer) {
  if (!keeps()) {
    const int slot = find_slot(index, /*early=*/false);
    if (const int holder = holders_[static_cast<std::size_t>(slot)]; holder >= 0) release(holder, writer);
    holders_[static_cast<std::size_t>(slot)] = index;
    unit(index).slot = slot;
  }
  unit(index).state = State::kGathering;
  schedule_.hold(index);
  const Links& links = writer.links(Axis::kShard);
  // A slot that ranks share may be filled only when no rank reads it any more.
  if (plan_.placement().shared)
    writer.call(Channel::kGather, links.cost(links.small, writer.ranks(Axis::kShard), 0), Spending::kGather, "barrier",
                index);
  // Offloaded parameters are only read into memory here; they are sent when the unit is needed.
  if (!plan_.parameters_below()) post(index, writer);
}

void GatherScript::post(int index, ScriptWriter& writer) {
  const Links& links = writer.links(Axis::kShard);
  const int ranks = writer.ranks(Axis::kShard);
  Unit& unit = this->unit(index);
  unit.is_posted = true;
  if (unit.has_copy) {  // a rounded copy is gathered only when a rank waits for it
    if (!plan_.placement().secondary.is_rounded()) post_inside(index, writer);
    return;
  }
  for (const GroupShape& group : shape(index).groups) {
    const std::int64_t part = owned({.shard = true}, plan_.placement().mesh, group.layout.numel()).numel;
    const CallCost cost = plan_.placement().shared
                              ? links.cost(links.small, ranks, 0)
                              : all_gather_in(plan_.wire().gathers, group.dtype, part, links, ranks);
    const int call = writer.post(Channel::kGather, cost, "all_gather", index);
    unit.calls.push_back(call);
    if (!links.gathers_in_background) writer.wait(call, Spending::kGather);
  }
}

/// Posts gathers among ranks that together have a second copy of the parameters. These gathers send nothing over the
/// shard axis's network, so their time is written as latency.
void GatherScript::post_inside(int index, ScriptWriter& writer) {
  const SecondaryCopy& copy = plan_.placement().secondary;
  const Links& links = writer.secondary_links();
  for (const GroupShape& group : shape(index).groups) {
    const WireForm form = plan_.rounds_secondary(group.dtype) ? WireForm::kInt8 : WireForm::kPlain;
    const CallCost cost = all_gather_in(form, group.dtype, group.layout.numel() / copy.ranks, links, copy.ranks);
    const CallCost alone{.latency_s = cost.seconds(), .busy_latency_s = cost.busy_seconds()};
    const int call = writer.post(Channel::kGather, alone, "all_gather inside", index);
    unit(index).calls.push_back(call);
    if (!links.gathers_in_background) writer.wait(call, Spending::kGather);
  }
}

void GatherScript::end_calls(int index, const Links& links, ScriptWriter& writer) {
  if (links.gathers_in_background) {
    for (const int call : unit(index).calls) writer.wait(call, Spending::kGather);
  }
  unit(index).calls.clear();
}

void GatherScript::wait(int index, ScriptWriter& writer) {
  Unit& unit = this->unit(index);
  if (!unit.is_posted) post(index, writer);
  end_calls(index, unit.has_copy ? writer.secondary_links() : writer.links(Axis::kShard), writer);
  if (plan_.secondary_holds(static_cast<std::size_t>(index))) {
    unit.has_copy = true;
    if (plan_.placement().secondary.is_rounded()) {
      post_inside(index, writer);
      end_calls(index, writer.secondary_links(), writer);
    }
  }
  unit.is_posted = false;
  unit.state = State::kGathered;
}

void GatherScript::release(int index, ScriptWriter& writer) {
  if (unit(index).state == State::kGathering) wait(index, writer);
  unit(index).state = State::kReleased;
  schedule_.give_up(index);
  if (unit(index).slot == kNoSlot) return;
  holders_[static_cast<std::size_t>(unit(index).slot)] = -1;
  unit(index).slot = kNoSlot;
}

void GatherScript::prefetch(ScriptWriter& writer) {
  for (int index = schedule_.next_missing(); index >= 0; index = schedule_.next_missing()) {
    if (!keeps() && find_slot(index, /*early=*/true) == kNoSlot) return;
    gather(index, writer);
  }
}

/// Chooses a slot as Residency does: an empty slot, or else the slot of the unit that is needed last, but never that of
/// the unit in use. A gather ahead of use evicts only a unit that is needed later than the gathered unit.
int GatherScript::find_slot(int index, bool early) {
  if (index == 0) return holders_[0] < 0 ? 0 : kNoSlot;
  for (std::size_t slot = 1; slot < holders_.size(); ++slot) {
    if (holders_[slot] < 0) return static_cast<int>(slot);
  }
  const auto may_go = [&](int holder) { return holder != last_ && fits(index, unit(holder).slot); };
  const int victim =
      early ? schedule_.farthest_held(schedule_.distance(index), may_go) : schedule_.farthest_held(may_go);
  return victim < 0 ? kNoSlot : unit(victim).slot;
}

}  // namespace tessera
