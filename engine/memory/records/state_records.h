#pragma once

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

/// Records of a rank's training state that lie below memory, of all its groups: of masters and optimizer states
/// (RecordLayout), or of parameters (Chunks).
///
/// A record stays open from its first visit until another one is visited, so that runs of one record that follow each other
/// move it once. Steps announce which records they will visit, and find them read ahead.
class StateRecords {
 public:
  /// `tier` holds them. `durable`: the same tier, where its records are durable.
  explicit StateRecords(std::unique_ptr<RecordTier> tier, DurableTier* durable = nullptr)
      : tier_(std::move(tier)), durable_(durable) {}
  StateRecords(const StateRecords&) = delete;
  StateRecords& operator=(const StateRecords&) = delete;

  /// The records that are visited next, in this order; the first ones are read ahead. If this order was announced before
  /// and none of it has been visited, it goes on from there.
  void begin_pass(std::span<const std::int64_t> order);
  /// Reads ahead as far as there is room. Who visits records does so, too; this is for the time between visits, in which writes end.
  void read_ahead();
  /// The first `count` records of the pass are over, visited or not.
  void pass(std::size_t count);
  /// The pass is over, and the last record closed. What was changed is written in the background.
  void end_pass();

  /// Calls `body` with the record's memory, which `body` may change if `updates`. From several threads, one at a time.
  /// Throws tessera::Error: 74 if a record cannot be read or if one could not be written, 65 if it came back with other
  /// bytes.
  void visit(std::int64_t record, bool updates, c10::function_ref<void(std::byte*)> body);

  /// `settle` is called before the host uses a record: by `owner`, which holds records for a device (StateStream, MappedRecords,
  /// DeviceShards). Null: nothing more is.
  void before_visits(const void* owner, std::function<void()> settle);
  /// Waits for the device, as before a visit: then memory of records that stay where they lie may be used.
  void settle() {
    for (const auto& [owner, settle_one] : before_visits_) settle_one();
  }
  /// The record's memory, as many bytes as it has, until it is let go. In a pass its next records are read ahead. Between the two nobody
  /// visits it. Throws as `visit`. REQUIRES: no more are held than the tier allows.
  std::span<std::byte> hold(std::int64_t record);
  void let_go(std::int64_t record, bool changed);

  /// Begins to copy a record to `memory`, which is as large; see RecordTier::start_copy. Passes do not notice.
  void start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag);
  /// Waits for the copies of `tag`; where it throws, none of them is under way any more either.
  void end_copies(std::uint64_t tag);

  /// Calls `body` with the tier; no record is open then, nor held. REQUIRES: records are durable.
  void between_passes(c10::function_ref<void(DurableTier&)> body);
  /// For what touches no record: DurableTier::sync and committed. REQUIRES: records are durable.
  DurableTier& durable() const { return *durable_; }

  /// Bytes moved since the records were made, and how long this rank stood still for them.
  TierCounters counters() const { return tier_->counters(); }
  /// Of the memory for records.
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
  /// The next record of the pass is visited, or passed over.
  void move_on() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<RecordTier> tier_;
  DurableTier* const durable_;
  std::map<const void*, std::function<void()>> before_visits_;  ///< by owner
  Mutex mutex_;
  std::int64_t open_ ABSL_GUARDED_BY(mutex_) = kNone;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  std::byte* memory_ ABSL_GUARDED_BY(mutex_) = nullptr;                                    ///< of the open record
  std::vector<std::int64_t> order_ ABSL_GUARDED_BY(mutex_);                                ///< of this pass
  std::size_t visited_ ABSL_GUARDED_BY(mutex_) = 0, fetched_ ABSL_GUARDED_BY(mutex_) = 0;  ///< of `order_`
};

}  // namespace tessera
