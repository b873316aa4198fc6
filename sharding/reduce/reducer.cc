#include "sharding/reduce/reducer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "runtime/border/throw.h"
#include "sharding/gather/gather_log.h"
#include "sharding/reduce/gradient_place.h"
#include "tessera/span.h"

namespace tessera {

// This file decides when a unit's gradients are summed.
//
// `take` packs a gradient into the unit's bucket. A unit whose gradients are complete is kReady; `launch_ready` goes
// through `order_` and reduces units as long as the next unit is ready. `reduce` starts the reduction of a unit, and
// then lets reductions that started earlier continue (Reductions). At the end of a backward, `finish` reduces the
// remaining units, then late gradients, and waits for all reductions. If gradients accumulate in place, all reductions
// are made in `finish`. Under "reproducible" these places hold the gradients of one microbatch, and `end_microbatch`
// joins them to the sums that wait.

Reducer::Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Memory memory,
                 ComputeDevice device, GradientVisitor* visitor)
    : memory_(std::move(memory)),
      setup_{plan, axes, device, plan.placement().mesh.world_size() == 1 && !memory_.sums_below},
      tree_(setup_),
      wire_(setup_, units, std::move(memory_.feedback)),
      buckets_(setup_, tree_, counts_),
      units_(reduced_units(units)),
      own_(setup_, units_, buckets_),
      notes_(setup_),
      was_late_(units_.size()),
      reductions_(setup_, {wire_, tree_, buckets_, notes_, counts_}, visitor, *this) {
  for (const ReducedUnit& unit : units_) {
    if (unit.gradients.trainable() > 0) order_.units.insert(order_.units.begin(), unit.unit->index);
  }
  buckets_.take_memory(units_, memory_.buckets, memory_.sums);
  std::size_t most_groups = 0;
  for (const Unit* unit : units) most_groups = std::max(most_groups, unit->groups.size());
  reductions_.take_memory(most_groups, memory_.scratch, memory_.sums);
  tree_.take_memory(units, memory_.scratch);
  memory_.buckets.expect_full();
  memory_.scratch.expect_full();
  memory_.sums.expect_full();
}

std::vector<ReducedUnit> Reducer::reduced_units(const std::vector<Unit*>& units) {
  std::vector<ReducedUnit> entries;
  for (Unit* unit : units) {
    entries.emplace_back(unit, GradientPacker(*unit, buckets_.dtype(), setup_.device, copies_));
  }
  return entries;
}

void Reducer::take(FlatGroup& group, std::size_t parameter, bool counts) {
  ReducedUnit& unit = entry(group.unit->index);
  at::Tensor& gradient = group.parameters[parameter].tensor.mutable_grad();
  if (setup_.updates_in_backward()) expect_not_updated(unit, group, parameter);
  if (setup_.makes_tree() && !setup_.accumulates()) expect_in_leaf(unit, group, parameter);
  if (on_gradient_) on_gradient_();
  if (group.unit->use_log) group.unit->use_log->note_gradient(group.unit->index);
  const bool was_ready = unit.phase == ReducedUnit::Phase::kReady;  // true: this gradient was not expected
  if (unit.phase == ReducedUnit::Phase::kIdle) open(unit);
  const bool is_usual_bucket = unit.bucket.overflow.bytes() == 0 && unit.sum.overflow.bytes() == 0;
  std::byte* const bucket = buckets_.of(unit, group);
  counts ? unit.gradients.take(group, parameter, gradient, bucket, is_usual_bucket)
         : unit.gradients.take_zeros(group, parameter, bucket);
  gradient.reset();
  // Under "reproducible", the unit's sum is complete only when `finish` has added it to the tree.
  if (setup_.is_alone && ++unit.taken == unit.gradients.trainable() && !setup_.makes_tree()) summed(unit);
  if (setup_.accumulates()) return copies_.flush_if_many();
  if (!unit.gradients.is_complete()) return;
  copies_.flush();
  if (was_ready) return;
  unit.phase = ReducedUnit::Phase::kReady;
  if (unit.reduced) return;  // a late gradient: the unit is reduced once more when the round ends
  order_.completed.push_back(unit.unit->index);
  launch_ready();
}

/// Reports a unit's sum. If there are no reductions (one rank), the sum is reported when the unit has as many gradients
/// as parameters, or else at the end of the round. It is reported again at the end of the round if more gradients have
/// arrived since then.
void Reducer::summed(ReducedUnit& unit) {
  if (!on_reduced_) return;
  if (setup_.is_alone) {
    if (unit.told > 0 && unit.told == unit.taken) return;
    copies_.flush();
    unit.told = unit.taken;
  }
  on_reduced_(*unit.unit);
}

/// Passes a unit whose sum is complete to the code that updates the unit. Afterwards the sum's place is free.
void Reducer::agreed(ReducedUnit& unit, const UnitAgreement& agreement) {
  on_summed_(*unit.unit, agreement);
  take_gradients_away(*unit.unit);
  buckets_.free_sum(unit);
}

void Reducer::expect_not_updated(const ReducedUnit& unit, const FlatGroup& group, std::size_t parameter) const {
  if (!unit.reduced) return;
  throw Error(
      ExitCode::kUsage,
      "parameter " + group.parameters[parameter].name + " of unit " + unit.unit->name +
          " got one more gradient in the same backward after the unit's gradients were complete, and "
          "optimizer.in_backward has given them to the optimizer. That happens where parameters are shared by parts of "
          "the graph with a backward of their own inside this one. [T0622] hint: set optimizer.in_backward to false");
}

void Reducer::expect_in_leaf(const ReducedUnit& unit, const FlatGroup& group, std::size_t parameter) const {
  if (!unit.reduced) return;
  throw Error(
      ExitCode::kUsage,
      "parameter " + group.parameters[parameter].name + " of unit " + unit.unit->name +
          " got one more gradient in the same backward after the unit's gradients were complete, and \"reproducible\" "
          "has sent them: the sum of ranks would not be that of one rank. That happens where parameters are shared by "
          "parts of the graph with a backward of their own inside this one. [T0816] hint: set gradient_sync to "
          "\"last_microbatch\", which waits for the end of backward");
}

void Reducer::open(ReducedUnit& unit) {
  unit.phase = ReducedUnit::Phase::kFilling;
  if (setup_.accumulates()) {
    if (setup_.makes_tree()) unit.gradients.begin();
    return;  // gradients stay marked as arrived until `reset`, unless "reproducible"
  }
  unit.gradients.begin();
  buckets_.open(unit);
}

void Reducer::end_microbatch(bool counts) {
  if (!setup_.accumulates()) return;
  copies_.flush();
  for (const int index : order_.units) {
    ReducedUnit& unit = entry(index);
    if (unit.phase == ReducedUnit::Phase::kIdle) unit.gradients.begin();  // this rank has no gradient for the unit
    unit.phase = ReducedUnit::Phase::kIdle;
    if (!counts) continue;
    for (const auto& group : unit.unit->groups) {
      if (!group->trainable) continue;
      std::byte* const leaf = buckets_.of(unit, *group);
      unit.gradients.fill_missing(*group, leaf, /*gaps_are_zero=*/false);
      tree_.join_leaf(*group, reinterpret_cast<float*>(leaf));
    }
  }
  if (counts) tree_.end_microbatch();
}

/// Reduces units in order, as long as the next unit is ready. A unit without a gradient is ready if no gradient is
/// expected.
void Reducer::launch_ready() {
  for (; order_.next < order_.units.size(); ++order_.next) {
    ReducedUnit& unit = entry(order_.units[order_.next]);
    if (unit.phase == ReducedUnit::Phase::kIdle && !unit.gradients.expects_any()) {
      open(unit);
      order_.completed.push_back(unit.unit->index);
    } else if (unit.phase != ReducedUnit::Phase::kReady) {
      return;
    }
    reduce(unit);
  }
}

void Reducer::expect(const std::vector<char>& used) {
  if (used == expected_) return;
  const bool is_first = expected_.empty();
  expected_ = used;
  expects_all_ = std::find(used.begin(), used.end(), 0) == used.end();
  if (is_first && expects_all_) return;
  std::span<const char> rest = expected_;
  for (ReducedUnit& unit : units_) {
    const auto count = static_cast<std::size_t>(unit.gradients.trainable());
    unit.gradients.expect(rest.first(count));
    rest = rest.subspan(count);
  }
  order_.agreed = false;
}

void Reducer::reduce(ReducedUnit& unit) {
  const Span span("reduce", unit.unit->name, &counts_.reduction_seconds);
  if (rounds_) rounds_->announce_and_add(RoundLog::kReduction);
  start(unit);
  reductions_.follow();
}

void Reducer::start(ReducedUnit& unit) {
  copies_.flush();
  if (setup_.updates_in_backward() && unit.sum.memory == nullptr) buckets_.place_sum(unit);
  // If gradients lie in the place of their sum, gaps stay zero: no other unit uses this place, so no other values were
  // written to the gaps. Only compressed reductions may leave values there that are not finite. Such a value would make
  // its neighbours NaN.
  const PlannedWire& wire = setup_.plan.wire();
  const bool is_compressed = wire.compressed_shard_part > 0 || wire.compressed_replicate_part > 0;
  const bool gaps_are_zero =
      setup_.device.is_queued && buckets_.is_in_place(unit) && !setup_.updates_in_backward() && !is_compressed;
  const bool is_filled = setup_.makes_tree() && setup_.accumulates();  // end_microbatch has filled the gaps
  reductions_.begin(unit, take_sum(unit));
  own_.before_reduction(unit);
  for (auto& group : unit.unit->groups) {
    if (!group->trainable) continue;
    if (!is_filled) unit.gradients.fill_missing(*group, buckets_.of(unit, *group), gaps_are_zero);
    reductions_.add(*group);
  }
  own_.after_reduction(unit);
  ++counts_.reductions;
  unit.reduced = true;
  unit.has_sum = true;
  unit.phase = ReducedUnit::Phase::kIdle;
  reductions_.post();
  if (setup_.updates_in_backward()) unit.unit->close();
}

/// If sums are offloaded, acquires the record of the unit's sum. If gradients are added to earlier sums, the next
/// unit's sum is read ahead.
Lease Reducer::take_sum(const ReducedUnit& unit) {
  if (!memory_.sums_below) return {};
  Lease sum = memory_.sums_below->acquire(unit.unit->index, unit.has_sum ? LeaseUse::kChange : LeaseUse::kOverwrite);
  if (order_.next + 1 >= order_.units.size()) return sum;
  const ReducedUnit& next = entry(order_.units[order_.next + 1]);
  const std::int64_t index = next.unit->index;
  if (next.has_sum && !next.reduced) memory_.sums_below->announce({&index, 1});
  return sum;
}

void Reducer::reduce_nothing() {
  if (setup_.accumulates() || order_.next == order_.units.size()) return;  // `finish` reduces them
  ReducedUnit& unit = entry(order_.units[order_.next++]);
  if (unit.phase == ReducedUnit::Phase::kIdle) open(unit);
  order_.completed.push_back(unit.unit->index);
  reduce(unit);
}

void Reducer::finish(bool reduce_now, bool has_batch) {
  if (setup_.accumulates()) {
    copies_.flush();
    if (reduce_now) {
      for (const int index : order_.units) reduce(entry(index));
      reductions_.end();
    }
    for (ReducedUnit& unit : units_) unit.taken = unit.told = 0;
    return;
  }
  // Reduces the remaining units, in order; a unit without a gradient takes part with zeros.
  for (; order_.next < order_.units.size(); ++order_.next) {
    ReducedUnit& unit = entry(order_.units[order_.next]);
    if (unit.phase == ReducedUnit::Phase::kIdle) open(unit);
    if (!unit.reduced && unit.phase == ReducedUnit::Phase::kFilling) order_.completed.push_back(unit.unit->index);
    reduce(unit);
  }
  reduce_late(has_batch);
  reductions_.end();
  for (ReducedUnit& unit : units_) unit.reduced = false;
  if (setup_.makes_tree()) tree_.end_microbatch();
  order_.next = 0;
  if (!order_.agreed) agree_on_order();
  order_.completed.clear();
}

/// Reduces units again, on all ranks, if gradients arrived after the units' reduction. If all gradients are expected, a
/// gradient is late only because of the module's code, which is the same on all ranks. Otherwise ranks that took
/// different branches may have different late units, so they tell each other which units are late.
void Reducer::reduce_late(bool has_batch) {
  const bool may_differ = !expects_all_ && setup_.axes.control->size() > 1;
  const std::vector<char> late = may_differ ? late_anywhere() : std::vector<char>();
  for (const int index : order_.units) {
    ReducedUnit& unit = entry(index);
    const bool is_idle = unit.phase == ReducedUnit::Phase::kIdle;
    char& was_late = was_late_[static_cast<std::size_t>(index)];
    if (has_batch) was_late = is_idle ? 0 : 1;
    if (may_differ ? !late[static_cast<std::size_t>(index)] : was_late == 0) continue;
    if (is_idle) open(unit);
    reduce(unit);
  }
}

/// Returns [unit]: whether any rank has a late gradient of the unit.
std::vector<char> Reducer::late_anywhere() const {
  std::vector<char> late(units_.size());
  for (std::size_t i = 0; i < late.size(); ++i) late[i] = units_[i].phase != ReducedUnit::Phase::kIdle;
  Collectives& control = *setup_.axes.control;
  std::vector<char> all(late.size() * static_cast<std::size_t>(control.size()));
  throw_if_error(control.all_gather("late gradients", late.data(), all.data(), late.size()).wait());
  for (std::size_t i = 0; i < all.size(); ++i) late[i % late.size()] |= all[i];
  return late;
}

void Reducer::agree_on_order() {
  std::vector<std::int32_t> order(order_.completed.begin(), order_.completed.end());
  TORCH_INTERNAL_ASSERT(order.size() == order_.units.size());
  Collectives& control = *setup_.axes.control;
  throw_if_error(control.broadcast("bucket order", order.data(), order.size() * sizeof(order[0]), 0).wait());
  order_.units.assign(order.begin(), order.end());
  order_.agreed = true;
}

void Reducer::reset() {
  copies_.drop();  // a backward that did not end may have left copies
  own_.reset();
  counts_.overflow_peak = counts_.overflow_bytes;
  tree_.reset();
  wire_.reset();
  for (ReducedUnit& unit : units_) {
    unit.has_sum = false;
    unit.taken = unit.told = 0;
    unit.gradients.reset();
  }
}

bool Reducer::used(const FlatGroup& group, std::size_t parameter) const {
  return units_[static_cast<std::size_t>(group.unit->index)].gradients.used(group, parameter);
}

}  // namespace tessera
