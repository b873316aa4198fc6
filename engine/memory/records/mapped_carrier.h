#pragma once

// See docs/glossary.md: lease.

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

namespace tessera {

/// Lets a GPU's kernels change or read records in pinned memory of its host in place, over the bus. A step's pass uses
/// a MappedCarrier for parameters, which kernels mostly write and seldom read. TrainingMemory owns it, and the thread
/// of the step calls it.
///
/// A lease's memory is for work that is queued on the current stream while the lease lasts. Several leases of one
/// record that follow each other count as one use of the record.
///
/// Records in files are held in memory from the moment at which the pass needs them until the kernels have used them,
/// at most `held` records at once. Then they are written to the disk. Other records never move. The host waits for the
/// kernels before host code visits a record (TierCarrier::visit), and when this object is destroyed (DeviceUse).
class MappedCarrier final : public Carrier {
 public:
  /// `kernels` must outlive this object. `held`: RecordPool::held.
  MappedCarrier(std::shared_ptr<TierCarrier> records, DeviceKernels& kernels, std::int64_t held, bool are_in_files);

  /// Records in files are read ahead (TierCarrier::announce).
  void announce(std::span<const std::int64_t> order) override;
  /// It does not wait for queued work that uses records.
  void flush() override;

  /// Waits until no kernel changes a record. Throws the errors of `acquire`.
  void settle();

  bool are_in_files() const { return are_in_files_; }

 private:
  struct Used {
    Lease lease;
    std::unique_ptr<DeviceKernels::Mark> done;  ///< null: the pass may still use the record
  };
  std::span<std::byte> take(std::int64_t record, LeaseUse use) override;
  void give_back(std::int64_t record, bool changed) override;
  void drop(std::int64_t) noexcept override {}
  void close();
  void let_go_oldest();

  const std::shared_ptr<TierCarrier> records_;
  DeviceKernels& kernels_;
  const std::size_t held_;
  const bool are_in_files_;
  std::vector<std::span<std::byte>> places_;     ///< [record]: its memory; empty if records lie in files
  std::deque<Used> used_;                        ///< records in files that are still held, oldest first
  std::span<std::byte> current_;                 ///< memory of the last record in `used_`
  bool is_used_ = false;                         ///< whether a record in memory was used since `passed_`
  std::unique_ptr<DeviceKernels::Mark> passed_;  ///< an event behind the last pass; null: host code has nothing to wait
                                                 ///< for
  const DeviceUse ends_;
};

}  // namespace tessera
