#include "engine/memory/records/mapped_records.h"

#include <exception>
#include <string>
#include <utility>

#include "engine/memory/records/record_places.h"
#include "runtime/base/log.h"

namespace tessera {

MappedRecords::MappedRecords(std::shared_ptr<StateRecords> records, DeviceKernels& kernels, std::int64_t held,
                             bool are_in_files)
    : records_(std::move(records)),
      kernels_(kernels),
      held_(static_cast<std::size_t>(held)),
      are_in_files_(are_in_files) {
  records_->before_visits(this, [this] { settle(); });
  if (are_in_files_) return;
  for (const std::span<std::byte> place : places_of(*records_)) places_.push_back(place.data());
}

MappedRecords::~MappedRecords() {
  records_->before_visits(this, nullptr);
  try {
    settle();
  } catch (const std::exception& error) {
    log_error(std::string("records that the GPU changes: ") + error.what());
  }
}

void MappedRecords::begin_pass(std::span<const std::int64_t> order) {
  if (!are_in_files_) return;
  settle();
  records_->begin_pass(order);
}

std::byte* MappedRecords::use(std::int64_t record, bool changes) {
  if (!are_in_files_) {
    is_used_ = true;
    return places_[static_cast<std::size_t>(record)];
  }
  if (current_ && used_.back().record == record) {
    used_.back().changed |= changes;
    return current_;
  }
  close();
  if (used_.size() == held_) let_go_oldest();
  current_ = records_->hold(record).data();
  used_.push_back({record, nullptr, changes});
  return current_;
}

void MappedRecords::end_pass() {
  close();
  passed_ = kernels_.mark();
  is_used_ = false;
  if (are_in_files_) records_->end_pass();
}

void MappedRecords::close() {
  if (std::exchange(current_, nullptr)) used_.back().done = kernels_.mark();
}

void MappedRecords::let_go_oldest() {
  used_.front().done->wait();
  const auto [record, changed] = std::pair(used_.front().record, used_.front().changed);
  used_.pop_front();
  records_->let_go(record, changed);
}

void MappedRecords::settle() {
  close();
  while (!used_.empty()) let_go_oldest();
  if (std::exchange(is_used_, false)) passed_ = kernels_.mark();
  if (const auto passed = std::exchange(passed_, nullptr)) passed->wait();
}

}  // namespace tessera
