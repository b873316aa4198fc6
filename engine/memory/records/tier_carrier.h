#pragma once

// See docs/glossary.md: carrier, lease, tier.

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
#include "sharding/carrier.h"
#include "tessera/memory.h"

namespace tessera {

/// Brings the offloaded records of all groups of this rank from their tier into memory, and takes them back. The
/// records hold masters and optimizer states (RecordLayout), or parameters (Chunks). TrainingMemory and the groups
/// share it. Any thread may call it; a mutex admits one thread at a time. A lease does not exclude other leases, so
/// that a carrier to a device can hold several records at once. A call of `visit` excludes other visits.
///
/// A record that was given back stays in memory until another record is acquired. Several leases of one record in a row
/// therefore move the record only once. A lease that is dropped leaves the bytes in the record's memory as they are.
/// Steps announce the records that they will use, so that these are read ahead.
class TierCarrier final : public Carrier {
 public:
  /// `tier` holds the records. `durable`: the same tier if its records are durable, else null.
  explicit TierCarrier(std::unique_ptr<RecordTier> tier, DurableTier* durable = nullptr)
      : tier_(std::move(tier)), durable_(durable) {}

  /// The first records are read ahead. If `order` is the rest of the order that was announced before, or all of it,
  /// reading ahead just continues. The records before `order` are passed over, whether they were acquired or not.
  void announce(std::span<const std::int64_t> order) override;
  /// Gives changed records to the tier, which writes them in the background.
  void flush() override;
  /// Reads ahead as far as there is memory. `acquire` reads ahead too. Call it between leases, to use the memory that
  /// finished writes have freed.
  void read_ahead();

  /// Calls `body` with the record's memory, under a lease; `body` may change it if `updates`. Several threads may call
  /// it; `body` runs on one thread at a time.
  void visit(std::int64_t record, bool updates, c10::function_ref<void(std::byte*)> body);

  /// Makes this object call `settle` before the host visits a record. The function belongs to `owner` (a DeviceUse),
  /// and waits for the device that uses records. A null `settle` removes the owner's function.
  void before_visits(const void* owner, std::function<void()> settle);
  /// Waits for the device, as a visit does. After that the host may use the memory of records that never move.
  void settle() {
    for (const auto& [owner, settle_one] : before_visits_) settle_one();
  }
  /// Begins to copy a record to `memory`, which is as large as the record (RecordTier::start_copy). The announced order
  /// of records does not change.
  void start_copy(std::int64_t record, std::span<std::byte> memory, std::uint64_t tag);
  /// Waits for the copies of `tag`. Throws the errors of `acquire`. No copy of `tag` is under way afterwards, even if
  /// the function throws.
  void end_copies(std::uint64_t tag);

  /// Calls `body` with the tier, at a time when this object has no record in use. REQUIRES: records are durable, and
  /// none has a lease.
  void between_passes(c10::function_ref<void(DurableTier&)> body);
  /// Returns the tier for calls that touch no record: DurableTier::sync and committed. REQUIRES: records are durable.
  DurableTier& durable() const { return *durable_; }

  /// Returns the bytes moved since the records were made, and how long this rank waited for them.
  TierCounters counters() const { return tier_->counters(); }
  /// Returns the bytes of the memory for records.
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(tier_->record_memory_bytes()); }
  std::string describe() const { return tier_->describe(); }
  std::int64_t records() const { return tier_->num_records(); }

 private:
  static constexpr std::int64_t kNone = -1;
  /// A record that the tier holds for this object.
  struct Held {
    std::int64_t record = kNone;
    std::span<std::byte> memory = {};
    bool changed = false;
  };

  std::span<std::byte> take(std::int64_t record, LeaseUse use) override;
  void give_back(std::int64_t record, bool changed) override;
  void drop(std::int64_t record) noexcept override;
  std::span<std::byte> get(std::int64_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_rest(std::span<const std::int64_t> order) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fetch_ahead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void pass_over(std::size_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Goes to the next record of the order.
  void move_on() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<RecordTier> tier_;
  DurableTier* const durable_;
  std::map<const void*, std::function<void()>> before_visits_;  ///< `settle` of each owner
  Mutex visits_;                                                ///< lets one visit in at a time; taken before `mutex_`
  Mutex mutex_;
  std::vector<Held> leased_ ABSL_GUARDED_BY(mutex_);
  Held idle_ ABSL_GUARDED_BY(mutex_);                        ///< the record that was given back last
  std::vector<std::int64_t> order_ ABSL_GUARDED_BY(mutex_);  ///< the records that were announced, in order
  /// The number of records of `order_` that were acquired or passed over, and of those that were fetched.
  std::size_t passed_ ABSL_GUARDED_BY(mutex_) = 0, fetched_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
