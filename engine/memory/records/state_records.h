#pragma once

// See docs/glossary.md: tier.

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/durable_tier.h"
#include "offload/tier.h"
#include "runtime/base/mutex.h"
#include "tessera/memory.h"

namespace tessera {

/// Gives access to the offloaded records of a rank's training state, of all its groups: records of masters and
/// optimizer states (RecordLayout), or of parameters (Chunks). TrainingMemory and the groups share it. Any thread may
/// call it; a mutex lets one in at a time.
///
/// A record stays open from its first visit until another one is visited, so that runs of one record that follow each
/// other move it once. Steps announce which records they will visit, and find them read ahead.
class StateRecords {
 public:
  /// `tier` holds the records. `durable`: the same tier where its records are durable, else null.
  explicit StateRecords(std::unique_ptr<RecordTier> tier, DurableTier* durable = nullptr)
      : tier_(std::move(tier)), durable_(durable) {}
  StateRecords(const StateRecords&) = delete;
  StateRecords& operator=(const StateRecords&) = delete;

  /// Announces the records that are visited next, in this order; the first ones are read ahead. If this order was
  /// announced before and none of it has been visited, reading ahead just continues.
  void begin_pass(std::span<const std::int64_t> order);
  /// Reads ahead as far as there is room. A visit reads ahead too. This call serves the time between visits, when ended
  /// writes have made room.
  void read_ahead();
  /// Says that the first `count` records of the pass are over, whether they were visited or not.
  void pass(std::size_t count);
  /// Ends the pass and closes the last record. Changed records are written in the background.
  void end_pass();

  /// Calls `body` with the record's memory, which `body` may change if `updates`. Several threads may call it; one
  /// enters at a time. Throws tessera::Error: 74 where a record cannot be read, or an earlier one could not be written;
  /// 65 where it came back with other bytes.
  void visit(std::int64_t record, bool updates, c10::function_ref<void(std::byte*)> body);

  /// Lets `settle` be called before the host uses a record. `owner` holds records for a device (SlotCarrier,
  /// MappedCarrier, DevicePartCarrier) and ends that use in `settle`. A null `settle` removes the owner's function.
  void before_visits(const void* owner, std::function<void()> settle);
  /// Waits for the device, as a visit does. The host may use the memory of records that never move after that.
  void settle() {
    for (const auto& [owner, settle_one] : before_visits_) settle_one();
  }
  /// Returns the record's memory, which is valid until `let_go`; the pass's next records are read ahead. Throws what
  /// `visit` throws. REQUIRES: nobody visits the record meanwhile, and no more records are held than the tier allows.
  std::span<std::byte> hold(std::int64_t record);
  void let_go(std::int64_t record, bool changed);

  /// Begins to copy a record to `memory`, which is as large as the record (RecordTier::start_copy). Passes are not
  /// affected.
  void start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag);
  /// Waits for the copies of `tag`. None of them is under way after it, even where it throws (as `visit`).
  void end_copies(std::uint64_t tag);

  /// Calls `body` with the tier while no record is open. REQUIRES: records are durable, and none is held.
  void between_passes(c10::function_ref<void(DurableTier&)> body);
  /// The tier itself, for calls that touch no record: DurableTier::sync and committed. REQUIRES: records are durable.
  DurableTier& durable() const { return *durable_; }

  /// Bytes moved since the records were made, and how long this rank stood still for them.
  TierCounters counters() const { return tier_->counters(); }
  /// Bytes of the memory for records.
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(tier_->record_memory_bytes()); }
  std::string describe() const { return tier_->describe(); }
  std::int64_t records() const { return tier_->num_records(); }

 private:
  static constexpr std::int64_t kNone = -1;

  std::span<std::byte> get(std::int64_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void open(std::int64_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fetch_ahead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void pass_over(std::size_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Goes to the next record of the pass.
  void move_on() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<RecordTier> tier_;
  DurableTier* const durable_;
  std::map<const void*, std::function<void()>> before_visits_;  ///< `settle` of each owner
  Mutex mutex_;
  std::int64_t open_ ABSL_GUARDED_BY(mutex_) = kNone;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  std::byte* memory_ ABSL_GUARDED_BY(mutex_) = nullptr;      ///< the open record's memory
  std::vector<std::int64_t> order_ ABSL_GUARDED_BY(mutex_);  ///< the records of this pass, in order
  /// How many records of `order_` were visited or passed over, and how many were fetched.
  std::size_t visited_ ABSL_GUARDED_BY(mutex_) = 0, fetched_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
