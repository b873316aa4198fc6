#pragma once

// See docs/glossary.md: carrier, lease, slot, tier.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "engine/memory/records/device_use.h"
#include "engine/memory/records/tier_carrier.h"
#include "optim/device_kernels.h"
#include "sharding/carrier.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// Brings records of masters and optimizer states from the memory of a GPU's host to the GPU, which updates them, and
/// takes them back. A record goes through a slot in the GPU's memory; the slots are used one after another (double
/// buffering, with `count` buffers). TrainingMemory owns it, and the thread of the step calls it. The memory of a lease
/// is the slot. Work that is queued on the current stream during the lease finds the record there, and its result is
/// copied back to the host. Copies run on separate streams at the same time as the computation, and events
/// (DeviceKernels::Mark) keep them in order:
///
/// 1. A copy to a slot waits until the slot's earlier content is copied back. It also waits until the result of the
///    record's last use is copied back. Records in pinned memory whose order is known are copied as soon as their slot
///    is free. If the order was announced before backward, these copies run while backward computes.
/// 2. Work in a slot waits for the copy to it, and the copy back waits for that work.
/// 3. Several leases may last at once: each lease has one slot, in addition to the slots for records that are brought
///    ahead. Records are copied back in the order in which they were acquired. A record that is only read is copied
///    back too (events depend on that copy), but it is not written to disk. A lease that is dropped leaves the host the
///    old values.
/// 4. Host code that visits a record (TierCarrier::visit) waits for all copies back, and so does the destructor
///    (DeviceUse).
///
/// Records in pinned memory (tier "host") have a fixed place on the host, so the host does not wait for their copies. A
/// record in files is in a buffer of its tier, in the host's memory, while it is in use. The host waits until the
/// record is read. It puts the record back into the tier after the record was copied back, at the latest when the slot
/// on the GPU is needed again.
class SlotCarrier final : public Carrier {
 public:
  /// Slots in the GPU's memory, one after another.
  struct Slots {
    std::byte* memory = nullptr;  ///< memory of the GPU
    std::int64_t bytes = 0;       ///< bytes of each slot; a multiple of 64
    std::int64_t count = 0;       ///< number of slots, which is also the number of records that may be in use
    std::int64_t ahead = 0;       ///< largest number of records that are brought ahead of their use
  };

  /// `kernels` and the slots must outlive this object. `are_in_files`: records lie in files; the tier can then hold as
  /// many records as there are slots (RecordTier::most_held).
  SlotCarrier(std::shared_ptr<TierCarrier> records, DeviceKernels& kernels, const Slots& slots, bool are_in_files);

  /// The first records of `order` are brought to the GPU ahead; records in files are read ahead. If this order was
  /// announced before and none of its records was acquired, nothing changes (TierCarrier::announce).
  void announce(std::span<const std::int64_t> order) override;
  /// It does not wait for the copies that are under way.
  void flush() override;

  /// Waits until all records are copied back to the host. Throws the errors of `acquire`.
  void settle();

  /// Measures the speed at which records in pinned memory are copied to the GPU while as many are copied back, in bytes
  /// per second in each direction. It copies at least `least_bytes` of records, or all records, to the GPU and back
  /// unchanged, and waits for the copies. `uploaded_bytes` does not count these copies. REQUIRES: records do not lie in
  /// files.
  double measure(std::int64_t least_bytes);

  bool are_in_files() const { return are_in_files_; }
  std::int64_t uploaded_bytes() const override { return uploaded_bytes_; }

 private:
  /// A record that is being copied to its slot.
  struct Coming {
    std::int64_t record;
    std::unique_ptr<DeviceKernels::Mark> mark;
  };
  /// A record that has a lease, or whose lease has ended while an earlier lease lasts.
  struct Here {
    enum class State : std::uint8_t { kLeased, kDone, kDropped };
    std::int64_t record;
    std::span<std::byte> on_host;  ///< memory of the record on the host
    State state = State::kLeased;
  };

  std::span<std::byte> take(std::int64_t record, LeaseUse use) override;
  void give_back(std::int64_t record, bool changed) override;
  void drop(std::int64_t record) noexcept override;
  Here& leased(std::int64_t record);
  std::deque<Lease>::reverse_iterator leaving(std::int64_t record);
  void end_uses();
  std::size_t slot_of(std::int64_t use) const { return static_cast<std::size_t>(use % slots_.count); }
  std::byte* memory_of(std::int64_t use) const {
    return slots_.memory + static_cast<std::int64_t>(slot_of(use)) * slots_.bytes;
  }
  const DeviceKernels::Mark& last_before(std::int64_t use, std::int64_t record) const;
  Coming bring(std::int64_t record, std::int64_t use, std::span<const std::byte> bytes) const;
  void bring_ahead();
  void give_up_ahead();
  std::span<std::byte> hold(std::int64_t record, LeaseUse use);
  void arrive(const Here& here, std::int64_t use);
  void let_go_oldest();
  void wait_for_copies_back();

  const std::shared_ptr<TierCarrier> records_;
  DeviceKernels& kernels_;
  const Slots slots_;
  const bool are_in_files_;
  const std::unique_ptr<DeviceKernels::Mark> made_;         ///< mark after which the slots' memory may be used
  std::int64_t uses_ = 0;                                   ///< number of uses of slots that have ended; use u is in
                                                            ///< slot u % count
  std::int64_t settled_ = 0;                                ///< number of uses whose copies back are known to be
                                                            ///< complete
  std::vector<std::unique_ptr<DeviceKernels::Mark>> back_;  ///< [slot]: the copy to the host after its last use
  std::vector<std::int64_t> last_use_;                      ///< [record]: its last use; -1: none
  std::deque<Lease> leaving_;                               ///< leases of records in files, oldest first
  std::vector<std::span<std::byte>> places_;                ///< [record]: its memory; empty if records lie in files
  std::vector<std::int64_t> order_;                         ///< the records of this pass; empty if records lie in files
  std::size_t passed_ = 0;                                  ///< number of records of `order_` whose use has ended
  bool has_passed_ = false;   ///< whether `passed_` has grown since records were last brought ahead
  std::deque<Coming> ahead_;  ///< records that are brought ahead of their use, in the order of `order_`
  std::deque<Here> here_;     ///< records on the GPU, for use number `uses_` and the uses after it
  std::int64_t uploaded_bytes_ = 0;
  const DeviceUse ends_;
};

/// Makes the carrier for the records of `pool`, with the memory `slots`. At most `ahead` slots are for records that are
/// brought before they are used; the number is smaller if the plan also brings parameters from the host.
std::unique_ptr<SlotCarrier> make_slot_carrier(const MemoryPlan& plan, std::shared_ptr<TierCarrier> records,
                                               const RecordPool& pool, std::byte* slots, std::int64_t ahead,
                                               DeviceKernels& kernels);

}  // namespace tessera
