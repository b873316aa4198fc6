#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "engine/memory/records/state_records.h"
#include "optim/device_kernels.h"

namespace tessera {

/// Lets a GPU's kernels change or read records in pinned memory of its host in place, over the bus. A step's pass uses
/// it for parameters, which it mostly writes and seldom reads. The thread of the step calls it.
///
/// Records in files are held from when the pass comes to them until the kernels are done with them, `held` at once;
/// then they are written to the disk. Other records never move. The host waits for the kernels before a record is
/// visited (StateRecords::before_visits).
class MappedRecords {
 public:
  /// `kernels` must outlive this object. `held`: RecordPool::held.
  MappedRecords(std::shared_ptr<StateRecords> records, DeviceKernels& kernels, std::int64_t held, bool are_in_files);
  /// Waits for the kernels; a failure is logged.
  ~MappedRecords();
  MappedRecords(const MappedRecords&) = delete;
  MappedRecords& operator=(const MappedRecords&) = delete;

  /// Announces the records that the next pass uses, in this order (StateRecords::begin_pass). Records in files are read
  /// ahead.
  void begin_pass(std::span<const std::int64_t> order);
  /// Returns the record's bytes, for work that is queued on the current stream until the next call. If `changes`, the
  /// record keeps what that work writes. Throws what StateRecords::visit and DeviceKernels throw.
  std::byte* use(std::int64_t record, bool changes);
  /// Ends the pass; its work may still run.
  void end_pass();

  /// Waits until no kernel changes a record. Throws what `use` throws.
  void settle();

  bool are_in_files() const { return are_in_files_; }

 private:
  struct Used {
    std::int64_t record;
    std::unique_ptr<DeviceKernels::Mark> done;  ///< null: more may be queued
    bool changed;
  };
  void close();
  void let_go_oldest();

  const std::shared_ptr<StateRecords> records_;
  DeviceKernels& kernels_;
  const std::size_t held_;
  const bool are_in_files_;
  std::vector<std::byte*> places_;               ///< [record]: its memory; empty for files
  std::deque<Used> used_;                        ///< records in files that are not let go yet, oldest first
  std::byte* current_ = nullptr;                 ///< the memory of the last one in `used_`
  bool is_used_ = false;                         ///< whether a record in memory was used since `passed_`
  std::unique_ptr<DeviceKernels::Mark> passed_;  ///< an event behind the last pass; null: nobody need wait for it
};

}  // namespace tessera
