#include "engine/memory/records/tier_carrier.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {

void TierCarrier::before_visits(const void* owner, std::function<void()> settle) {
  before_visits_.erase(owner);
  if (settle) before_visits_[owner] = std::move(settle);
}

void TierCarrier::announce(std::span<const std::int64_t> order) {
  const MutexLock no_visit(visits_);
  const MutexLock lock(mutex_);
  close();
  if (is_rest(order)) {
    pass_over(order_.size() - order.size());
  } else {
    pass_over(order_.size());
    order_.assign(order.begin(), order.end());
    passed_ = fetched_ = 0;
  }
  fetch_ahead();
}

/// Returns whether `order` is the last part of the announced order, and whether none of the records of this part was
/// acquired or passed over.
bool TierCarrier::is_rest(std::span<const std::int64_t> order) const {
  if (order.size() > order_.size()) return false;
  const std::size_t begin = order_.size() - order.size();
  return passed_ <= begin && std::ranges::equal(order, std::span(order_).subspan(begin));
}

void TierCarrier::read_ahead() {
  const MutexLock no_visit(visits_);
  const MutexLock lock(mutex_);
  fetch_ahead();
}

void TierCarrier::flush() {
  const MutexLock no_visit(visits_);
  const MutexLock lock(mutex_);
  close();
  pass_over(order_.size());
  order_.clear();
  passed_ = fetched_ = 0;
}

void TierCarrier::visit(std::int64_t record, bool updates, c10::function_ref<void(std::byte*)> body) {
  settle();
  const MutexLock lock(visits_);
  Lease lease = acquire(record, updates ? LeaseUse::kChange : LeaseUse::kRead);
  body(lease.bytes().data());
  lease.give_back();
}

std::span<std::byte> TierCarrier::take(std::int64_t record, LeaseUse use) {
  const MutexLock lock(mutex_);
  if (record == idle_.record) {
    leased_.push_back(std::exchange(idle_, Held()));
  } else {
    close();
    leased_.push_back({record, get(record)});
    fetch_ahead();
  }
  Held& held = leased_.back();
  held.changed = held.changed || use != LeaseUse::kRead;
  return held.memory;
}

/// Gives the tier the record that was given back before `record`, and keeps `record`.
void TierCarrier::give_back(std::int64_t record, bool changed) {
  const MutexLock lock(mutex_);
  const auto found = std::ranges::find(leased_, record, &Held::record);
  TORCH_INTERNAL_ASSERT(found != leased_.end(), "record ", record, " has no lease");
  Held held = *found;
  held.changed = held.changed || changed;
  leased_.erase(found);
  const Held before = std::exchange(idle_, held);
  if (before.record != kNone)
    throw_if_error(before.changed ? tier_->put(before.record) : tier_->release(before.record));
}

void TierCarrier::drop(std::int64_t record) noexcept {
  try {
    give_back(record, /*changed=*/true);
  } catch (const std::exception& error) {
    log_error("record " + std::to_string(record) + " could not be given back: " + error.what());
  }
}

void TierCarrier::start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) {
  settle();
  const MutexLock no_visit(visits_);
  const MutexLock lock(mutex_);
  if (record == idle_.record) close();
  throw_if_error(tier_->start_copy(record, memory, tag));
}

void TierCarrier::end_copies(std::uint64_t tag) {
  const MutexLock no_visit(visits_);
  const MutexLock lock(mutex_);
  throw_if_error(tier_->end_copies(tag));
}

void TierCarrier::between_passes(c10::function_ref<void(DurableTier&)> body) {
  settle();
  const MutexLock no_visit(visits_);
  const MutexLock lock(mutex_);
  close();
  body(*durable_);
}

std::span<std::byte> TierCarrier::get(std::int64_t record) {
  if (passed_ < order_.size() && order_[passed_] == record) move_on();
  return value_or_throw(tier_->get(record));
}

/// Gives the tier the record that was given back last.
void TierCarrier::close() {
  const Held held = std::exchange(idle_, Held());
  if (held.record != kNone) throw_if_error(held.changed ? tier_->put(held.record) : tier_->release(held.record));
}

/// Passes over the records of the order before index `end`. A record that was fetched must be got and released, because
/// until then it counts among the records that are read ahead. REQUIRES: no record is idle.
void TierCarrier::pass_over(std::size_t end) {
  for (; passed_ < std::min(end, fetched_); move_on()) {
    if (tier_->stays_in_memory(order_[passed_])) continue;
    throw_if_error(tier_->get(order_[passed_]).status());
    throw_if_error(tier_->release(order_[passed_]));
  }
  passed_ = std::max(passed_, end);
  fetched_ = std::max(fetched_, passed_);
}

void TierCarrier::move_on() {
  ++passed_;
  fetched_ = std::max(fetched_, passed_);
}

/// Reads ahead until the tier has no memory for another record. Records that stay in memory need none.
void TierCarrier::fetch_ahead() {
  while (fetched_ < order_.size() && tier_->fetch(order_[fetched_])) ++fetched_;
}

}  // namespace tessera
