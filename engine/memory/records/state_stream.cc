#include "engine/memory/records/state_stream.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "engine/memory/records/record_places.h"
#include "runtime/base/log.h"

namespace tessera {

std::unique_ptr<StateStream> make_state_stream(const MemoryPlan& plan, std::shared_ptr<StateRecords> records,
                                               const RecordPool& pool, std::byte* slots, std::int64_t ahead,
                                               DeviceKernels& kernels) {
  // Copies to the GPU run in one order. Units that come from the host must not wait for records that wait for slots, so
  // few records are brought ahead.
  if (plan.parameters_below()) ahead = std::min<std::int64_t>(2, ahead);
  return std::make_unique<StateStream>(std::move(records), kernels,
                                       StateStream::Slots{slots, pool.record_bytes, pool.device_slots, ahead},
                                       pool.pinned_bytes == 0);
}

StateStream::StateStream(std::shared_ptr<StateRecords> records, DeviceKernels& kernels, const Slots& slots,
                         bool are_in_files)
    : records_(std::move(records)),
      kernels_(kernels),
      slots_(slots),
      are_in_files_(are_in_files),
      made_(kernels.mark()),
      back_(static_cast<std::size_t>(slots.count)),
      last_use_(static_cast<std::size_t>(records_->records()), -1) {
  records_->before_visits(this, [this] { settle(); });
  if (!are_in_files_) places_ = places_of(*records_);
}

StateStream::~StateStream() {
  records_->before_visits(this, nullptr);
  try {
    settle();
  } catch (const std::exception& error) {
    log_error(std::string("records on their way from the GPU: ") + error.what());
  }
}

void StateStream::begin_pass(std::span<const std::int64_t> order) {
  if (are_in_files_) {
    settle();
    return records_->begin_pass(order);
  }
  if (passed_ == 0 && std::ranges::equal(order, order_)) return bring_ahead();
  give_up_ahead();
  order_.assign(order.begin(), order.end());
  passed_ = 0;
  bring_ahead();
}

/// Brings the next records of the pass ahead, as many as are allowed. The copy to a slot waits for what the slot held
/// before (last_before).
void StateStream::bring_ahead() {
  for (std::size_t next = passed_ + ahead_.size();
       next < order_.size() && static_cast<std::int64_t>(ahead_.size()) < slots_.ahead; ++next) {
    const std::int64_t record = order_[next], use = uses_ + static_cast<std::int64_t>(ahead_.size());
    ahead_.push_back(bring(record, use, places_[static_cast<std::size_t>(record)]));
  }
}

/// Forgets the records that were brought ahead. Copies to slots run in the order in which they were queued, so the next
/// copies to these slots come after them.
void StateStream::give_up_ahead() { ahead_.clear(); }

StateStream::Coming StateStream::bring(std::int64_t record, std::int64_t use, std::span<const std::byte> bytes) const {
  const DeviceKernels::UploadPiece piece{memory_of(use), bytes.data(), bytes.size()};
  return {record, kernels_.upload({&piece, 1}, &last_before(use, record))};
}

void StateStream::pass_through(std::int64_t record, bool changes, c10::function_ref<void(std::byte*)> queue) {
  pass_through({&record, 1}, changes, [&](std::span<std::byte* const> there) { queue(there.front()); });
}

void StateStream::pass_through(std::span<const std::int64_t> records, bool changes,
                               c10::function_ref<void(std::span<std::byte* const>)> queue) {
  here_.clear();
  there_.clear();
  try {
    for (const std::int64_t record : records) {
      const std::int64_t use = uses_ + static_cast<std::int64_t>(here_.size());
      here_.push_back(arrive(record, use, changes));
      there_.push_back(memory_of(use));
    }
    queue(there_);
  } catch (...) {
    turn_back(records);
    throw;
  }
  const std::size_t before = passed_;
  for (std::size_t i = 0; i < records.size(); ++i) {
    back_[slot_of(uses_)] = kernels_.download(here_[i].data(), there_[i], here_[i].size());
    last_use_[static_cast<std::size_t>(records[i])] = uses_;
    ++uses_;
    streamed_bytes_ += static_cast<std::int64_t>(here_[i].size());
    if (passed_ < order_.size() && order_[passed_] == records[i]) ++passed_;
  }
  if (passed_ > before) bring_ahead();
}

/// Is called while a failure is thrown. It drops the changes of records on the GPU, so the host keeps the old values.
void StateStream::turn_back(std::span<const std::int64_t> records) {
  give_up_ahead();
  std::vector<std::int64_t> turned;
  while (turned.size() < records.size() && !leaving_.empty() &&
         std::ranges::find(records, leaving_.back().record) != records.end()) {
    turned.push_back(leaving_.back().record);
    leaving_.pop_back();
  }
  const auto attempt = [](const auto& body) {
    try {
      body();
    } catch (const std::exception& error) {
      log_error(std::string("records on their way to the GPU: ") + error.what());
    }
  };
  attempt([&] { kernels_.mark()->wait(); });  // work on the GPU may still read them
  for (const std::int64_t record : turned) attempt([&] { records_->let_go(record, /*changed=*/false); });
}

/// Returns the record's bytes on the host. Work that is queued from now on finds them in the slot of `use`.
std::span<std::byte> StateStream::arrive(std::int64_t record, std::int64_t use, bool changes) {
  const std::span<std::byte> bytes = are_in_files_ ? hold(record, changes) : places_[static_cast<std::size_t>(record)];
  if (!ahead_.empty() && ahead_.front().record != record) give_up_ahead();
  if (ahead_.empty()) ahead_.push_back(bring(record, use, bytes));
  ahead_.front().mark->join();
  ahead_.pop_front();
  return bytes;
}

/// Holds a record that lies in files: waits until it is read, and keeps it until its copy back has passed.
std::span<std::byte> StateStream::hold(std::int64_t record, bool changes) {
  if (static_cast<std::int64_t>(leaving_.size()) == slots_.count) let_go_oldest();
  const std::span<std::byte> bytes = records_->hold(record);
  leaving_.push_back({record, changes});
  return bytes;
}

/// The event for which the copy of `record` to the slot of `use` must wait: the copies back of what the slot held, and
/// of the record's last use. Copies back run in the order in which they were queued, so the later of the two is enough.
const DeviceKernels::Mark& StateStream::last_before(std::int64_t use, std::int64_t record) const {
  const std::int64_t last = std::max(use - slots_.count, last_use_[static_cast<std::size_t>(record)]);
  return last < 0 ? *made_ : *back_[slot_of(last)];
}

void StateStream::end_pass() {
  if (are_in_files_) return records_->end_pass();
  give_up_ahead();
  order_.clear();
  passed_ = 0;
}

void StateStream::let_go_oldest() {
  const auto [record, changed] = leaving_.front();
  const std::int64_t use = last_use_[static_cast<std::size_t>(record)];
  leaving_.pop_front();
  if (use >= 0) {  // otherwise the record was never on the GPU
    back_[slot_of(use)]->wait();
    settled_ = use + 1;
  }
  records_->let_go(record, changed);
}

void StateStream::settle() {
  while (!leaving_.empty()) let_go_oldest();
  for (const Coming& coming : ahead_) coming.mark->wait();  // the caller may change records after this
  give_up_ahead();
  if (settled_ == uses_) return;
  back_[slot_of(uses_ - 1)]->wait();
  settled_ = uses_;
}

double StateStream::measure(std::int64_t least_bytes) {
  made_->wait();
  settle();
  const std::int64_t before = streamed_bytes_;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t record = 0; record < records_->records() && streamed_bytes_ - before < least_bytes; ++record) {
    pass_through(record, /*changes=*/true, [](std::byte*) {});
  }
  settle();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  const std::int64_t bytes = streamed_bytes_ - before;
  streamed_bytes_ = before;
  return static_cast<double>(bytes) / taken.count();
}

}  // namespace tessera
