#include "engine/memory/records/slot_carrier.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <string>
#include <utility>

#include "engine/memory/records/record_places.h"
#include "runtime/base/log.h"

namespace tessera {

std::unique_ptr<SlotCarrier> make_slot_carrier(const MemoryPlan& plan, std::shared_ptr<TierCarrier> records,
                                               const RecordPool& pool, std::byte* slots, std::int64_t ahead,
                                               DeviceKernels& kernels) {
  // Copies to the GPU run in one order. Copies of units from the host must not wait behind copies of records that wait
  // for slots, so few records are brought ahead.
  if (plan.parameters_below()) ahead = std::min<std::int64_t>(2, ahead);
  return std::make_unique<SlotCarrier>(std::move(records), kernels,
                                       SlotCarrier::Slots{slots, pool.record_bytes, pool.device_slots, ahead},
                                       pool.pinned_bytes == 0);
}

SlotCarrier::SlotCarrier(std::shared_ptr<TierCarrier> records, DeviceKernels& kernels, const Slots& slots,
                         bool are_in_files)
    : records_(std::move(records)),
      kernels_(kernels),
      slots_(slots),
      are_in_files_(are_in_files),
      made_(kernels.mark()),
      back_(static_cast<std::size_t>(slots.count)),
      last_use_(static_cast<std::size_t>(records_->records()), -1),
      ends_(records_, "records on their way from the GPU", [this] { settle(); }) {
  if (!are_in_files_) places_ = places_of(*records_);
}

void SlotCarrier::announce(std::span<const std::int64_t> order) {
  if (are_in_files_) {
    settle();
    return records_->announce(order);
  }
  if (passed_ == 0 && std::ranges::equal(order, order_)) return bring_ahead();
  give_up_ahead();
  order_.assign(order.begin(), order.end());
  passed_ = 0;
  bring_ahead();
}

/// Brings the next records of the pass ahead, as many as are allowed. The copy to a slot waits for the slot's earlier
/// content to be copied back (last_before).
void SlotCarrier::bring_ahead() {
  for (std::size_t next = passed_ + ahead_.size();
       next < order_.size() && static_cast<std::int64_t>(ahead_.size()) < slots_.ahead; ++next) {
    const std::int64_t record = order_[next], use = uses_ + static_cast<std::int64_t>(ahead_.size());
    ahead_.push_back(bring(record, use, places_[static_cast<std::size_t>(record)]));
  }
}

/// Forgets the records that were brought ahead. Copies to slots run in the order in which they were queued, so the next
/// copies to these slots come after them.
void SlotCarrier::give_up_ahead() { ahead_.clear(); }

SlotCarrier::Coming SlotCarrier::bring(std::int64_t record, std::int64_t use, std::span<const std::byte> bytes) const {
  const DeviceKernels::UploadPiece piece{memory_of(use), bytes.data(), bytes.size()};
  return {record, kernels_.upload({&piece, 1}, &last_before(use, record))};
}

std::span<std::byte> SlotCarrier::take(std::int64_t record, LeaseUse use) {
  const std::int64_t nth = uses_ + static_cast<std::int64_t>(here_.size());
  here_.push_back({record, are_in_files_ ? hold(record, use) : places_[static_cast<std::size_t>(record)]});
  try {
    arrive(here_.back(), nth);
  } catch (...) {
    drop(record);
    throw;
  }
  return {memory_of(nth), here_.back().on_host.size()};
}

/// All work that is queued after this call waits until the record is in the slot of `use`.
void SlotCarrier::arrive(const Here& here, std::int64_t use) {
  if (!ahead_.empty() && ahead_.front().record != here.record) give_up_ahead();
  if (ahead_.empty()) ahead_.push_back(bring(here.record, use, here.on_host));
  ahead_.front().mark->join();
  ahead_.pop_front();
}

/// Returns the latest of the leases that the record has now.
SlotCarrier::Here& SlotCarrier::leased(std::int64_t record) {
  const auto found = std::find_if(here_.rbegin(), here_.rend(), [&](const Here& here) {
    return here.record == record && here.state == Here::State::kLeased;
  });
  TORCH_INTERNAL_ASSERT(found != here_.rend(), "record ", record, " has no lease");
  return *found;
}

/// Returns the latest lease of a record in files that has not ended.
std::deque<Lease>::reverse_iterator SlotCarrier::leaving(std::int64_t record) {
  return std::find_if(leaving_.rbegin(), leaving_.rend(), [&](const Lease& lease) { return lease.record() == record; });
}

void SlotCarrier::give_back(std::int64_t record, bool changed) {
  leased(record).state = Here::State::kDone;
  if (const auto held = leaving(record); changed && held != leaving_.rend()) held->change();
  end_uses();
}

/// If leases have ended, queues the copies of their records to the host, in the order of the uses. When no record is
/// left on the GPU, the next records are brought ahead.
void SlotCarrier::end_uses() {
  while (!here_.empty() && here_.front().state != Here::State::kLeased) {
    const Here here = here_.front();
    const bool goes_back = here.state == Here::State::kDone;
    // If the record was dropped, the slot's next record need only wait for the work that used the slot.
    back_[slot_of(uses_)] =
        goes_back ? kernels_.download(here.on_host.data(), memory_of(uses_), here.on_host.size()) : kernels_.mark();
    here_.pop_front();
    const std::int64_t use = uses_++;
    if (!goes_back) continue;
    last_use_[static_cast<std::size_t>(here.record)] = use;
    uploaded_bytes_ += static_cast<std::int64_t>(here.on_host.size());
    if (passed_ == order_.size() || order_[passed_] != here.record) continue;
    ++passed_;
    has_passed_ = true;
  }
  if (here_.empty() && std::exchange(has_passed_, false)) bring_ahead();
}

/// It is called while a failure is thrown. The record does not go back, so the host keeps the old values.
void SlotCarrier::drop(std::int64_t record) noexcept {
  const auto attempt = [](const auto& body) {
    try {
      body();
    } catch (const std::exception& error) {
      log_error(std::string("records on their way to the GPU: ") + error.what());
    }
  };
  give_up_ahead();
  has_passed_ = false;
  attempt([&] {
    kernels_.mark()->wait();  // work on the GPU may still read the slot
    wait_for_copies_back();
  });
  attempt([&] {
    leased(record).state = Here::State::kDropped;
    end_uses();
  });
  const auto held = leaving(record);
  if (held == leaving_.rend()) return;
  held->drop();
  leaving_.erase(std::prev(held.base()));
}

/// Holds a record that lies in files: waits until it is read, and keeps it until its copy back has passed.
std::span<std::byte> SlotCarrier::hold(std::int64_t record, LeaseUse use) {
  if (static_cast<std::int64_t>(leaving_.size()) == slots_.count) let_go_oldest();
  return leaving_.emplace_back(records_->acquire(record, use)).bytes();
}

/// Returns the event for which the copy of `record` to the slot of `use` must wait. The copy must wait until the slot's
/// earlier content, and the result of the record's last use, are copied to the host. These copies run in the order in
/// which they were queued, so waiting for the later one is enough.
const DeviceKernels::Mark& SlotCarrier::last_before(std::int64_t use, std::int64_t record) const {
  const std::int64_t last = std::max(use - slots_.count, last_use_[static_cast<std::size_t>(record)]);
  return last < 0 ? *made_ : *back_[slot_of(last)];
}

void SlotCarrier::flush() {
  if (are_in_files_) return records_->flush();
  give_up_ahead();
  order_.clear();
  passed_ = 0;
}

void SlotCarrier::let_go_oldest() {
  Lease oldest = std::move(leaving_.front());
  leaving_.pop_front();
  const std::int64_t use = last_use_[static_cast<std::size_t>(oldest.record())];
  if (use >= 0) {  // otherwise the record was never on the GPU
    back_[slot_of(use)]->wait();
    settled_ = use + 1;
  }
  oldest.give_back();
}

void SlotCarrier::settle() {
  while (!leaving_.empty()) let_go_oldest();
  for (const Coming& coming : ahead_) coming.mark->wait();  // the caller may change records after this call
  give_up_ahead();
  wait_for_copies_back();
}

void SlotCarrier::wait_for_copies_back() {
  if (settled_ == uses_) return;
  back_[slot_of(uses_ - 1)]->wait();
  settled_ = uses_;
}

double SlotCarrier::measure(std::int64_t least_bytes) {
  made_->wait();
  settle();
  const std::int64_t before = uploaded_bytes_;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t record = 0; record < records_->records() && uploaded_bytes_ - before < least_bytes; ++record) {
    acquire(record, LeaseUse::kChange).give_back();
  }
  settle();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  const std::int64_t bytes = uploaded_bytes_ - before;
  uploaded_bytes_ = before;
  return static_cast<double>(bytes) / taken.count();
}

}  // namespace tessera
