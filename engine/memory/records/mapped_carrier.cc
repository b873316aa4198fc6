#include "engine/memory/records/mapped_carrier.h"

#include <algorithm>
#include <utility>

#include "engine/memory/records/record_places.h"

namespace tessera {

MappedCarrier::MappedCarrier(std::shared_ptr<TierCarrier> records, DeviceKernels& kernels, std::int64_t held,
                             bool are_in_files)
    : records_(std::move(records)),
      kernels_(kernels),
      held_(static_cast<std::size_t>(held)),
      are_in_files_(are_in_files),
      ends_(records_, "records that the GPU changes", [this] { settle(); }) {
  if (!are_in_files_) places_ = places_of(*records_);
}

void MappedCarrier::announce(std::span<const std::int64_t> order) {
  if (!are_in_files_) return;
  settle();
  records_->announce(order);
}

std::span<std::byte> MappedCarrier::take(std::int64_t record, LeaseUse use) {
  if (!are_in_files_) {
    is_used_ = true;
    return places_[static_cast<std::size_t>(record)];
  }
  if (!current_.empty() && used_.back().lease.record() == record) {
    if (use != LeaseUse::kRead) used_.back().lease.change();
    return current_;
  }
  close();
  if (used_.size() == held_) let_go_oldest();
  used_.push_back({records_->acquire(record, use), nullptr});
  current_ = used_.back().lease.bytes();
  return current_;
}

/// The record stays in use, since the next lease may be of the same record.
void MappedCarrier::give_back(std::int64_t record, bool changed) {
  const auto is_its = [&](const Used& used) { return used.lease.record() == record; };
  const auto used = std::find_if(used_.rbegin(), used_.rend(), is_its);
  if (changed && used != used_.rend()) used->lease.change();
}

void MappedCarrier::flush() {
  close();
  passed_ = kernels_.mark();
  is_used_ = false;
  if (are_in_files_) records_->flush();
}

void MappedCarrier::close() {
  if (!std::exchange(current_, {}).empty()) used_.back().done = kernels_.mark();
}

void MappedCarrier::let_go_oldest() {
  used_.front().done->wait();
  Lease oldest = std::move(used_.front().lease);
  used_.pop_front();
  oldest.give_back();
}

void MappedCarrier::settle() {
  close();
  while (!used_.empty()) let_go_oldest();
  if (std::exchange(is_used_, false)) passed_ = kernels_.mark();
  if (const auto passed = std::exchange(passed_, nullptr)) passed->wait();
}

}  // namespace tessera
