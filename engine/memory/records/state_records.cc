#include "engine/memory/records/state_records.h"

#include <algorithm>
#include <utility>

#include "runtime/border/throw.h"

namespace tessera {

void StateRecords::before_visits(const void* owner, std::function<void()> settle) {
  before_visits_.erase(owner);
  if (settle) before_visits_[owner] = std::move(settle);
}

void StateRecords::begin_pass(std::span<const std::int64_t> order) {
  const MutexLock lock(mutex_);
  close();
  if (visited_ == 0 && std::ranges::equal(order, order_)) return fetch_ahead();
  pass_over(order_.size());
  order_.assign(order.begin(), order.end());
  visited_ = fetched_ = 0;
  fetch_ahead();
}

void StateRecords::read_ahead() {
  const MutexLock lock(mutex_);
  fetch_ahead();
}

void StateRecords::pass(std::size_t count) {
  const MutexLock lock(mutex_);
  close();
  pass_over(count);
  fetch_ahead();
}

void StateRecords::end_pass() {
  const MutexLock lock(mutex_);
  close();
  pass_over(order_.size());
  order_.clear();
  visited_ = fetched_ = 0;
}

void StateRecords::visit(std::int64_t record, bool updates, c10::function_ref<void(std::byte*)> body) {
  settle();
  const MutexLock lock(mutex_);
  if (record != open_) open(record);
  changed_ = changed_ || updates;
  body(memory_);
}

std::span<std::byte> StateRecords::hold(std::int64_t record) {
  const MutexLock lock(mutex_);
  close();
  const std::span<std::byte> bytes = get(record);
  fetch_ahead();
  return bytes;
}

void StateRecords::let_go(std::int64_t record, bool changed) {
  const MutexLock lock(mutex_);
  throw_if_error(changed ? tier_->put(record) : tier_->release(record));
}

void StateRecords::start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag) {
  settle();
  const MutexLock lock(mutex_);
  if (record == open_) close();
  throw_if_error(tier_->start_copy(record, memory, tag));
}

void StateRecords::end_copies(std::uint64_t tag) {
  const MutexLock lock(mutex_);
  throw_if_error(tier_->end_copies(tag));
}

void StateRecords::between_passes(c10::function_ref<void(DurableTier&)> body) {
  settle();
  const MutexLock lock(mutex_);
  close();
  body(*durable_);
}

std::span<std::byte> StateRecords::get(std::int64_t record) {
  if (visited_ < order_.size() && order_[visited_] == record) move_on();
  return value_or_throw(tier_->get(record));
}

void StateRecords::open(std::int64_t record) {
  close();
  memory_ = get(record).data();
  open_ = record;
  fetch_ahead();
}

void StateRecords::close() {
  if (open_ == kNone) return;
  const std::int64_t record = std::exchange(open_, kNone);
  throw_if_error(std::exchange(changed_, false) ? tier_->put(record) : tier_->release(record));
}

/// Passes over the records of the pass before `end`. A record that was fetched is got and released, because it counts
/// among the records that are read ahead until it is got. REQUIRES: no record is open.
void StateRecords::pass_over(std::size_t end) {
  for (; visited_ < std::min(end, fetched_); move_on()) {
    if (tier_->stays_in_memory(order_[visited_])) continue;
    throw_if_error(tier_->get(order_[visited_]).status());
    throw_if_error(tier_->release(order_[visited_]));
  }
  visited_ = std::max(visited_, end);
  fetched_ = std::max(fetched_, visited_);
}

void StateRecords::move_on() {
  ++visited_;
  fetched_ = std::max(fetched_, visited_);
}

/// Reads ahead until the tier has no room. Records that stay in memory need no room.
void StateRecords::fetch_ahead() {
  while (fetched_ < order_.size() && tier_->fetch(order_[fetched_])) ++fetched_;
}

}  // namespace tessera
