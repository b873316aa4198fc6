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

/// Records in pinned memory of a host, as a pass of its GPU's kernels changes or reads them: there, over the bus. Of parameters, which
/// a pass mostly writes and seldom reads.
///
/// Those in files are held from when the pass comes to them until the kernels are through, `held` at once, and are written to the disk
/// after that. Others stay where they lie. Before anybody visits a record, the host waits for the kernels (StateRecords::before_visits).
class MappedRecords {
 public:
  /// `kernels` outlive this. `held`: RecordPool::held.
  MappedRecords(std::shared_ptr<StateRecords> records, DeviceKernels& kernels, std::int64_t held, bool are_in_files);
  /// Waits for the kernels; a failure is logged.
  ~MappedRecords();
  MappedRecords(const MappedRecords&) = delete;
  MappedRecords& operator=(const MappedRecords&) = delete;

  /// The records that the next pass uses, in this order; those in files are read ahead. As StateRecords::begin_pass.
  void begin_pass(std::span<const std::int64_t> order);
  /// The record's bytes. What is queued on the current stream until the next call finds them, and what it leaves there counts if it
  /// `changes` them. Throws as StateRecords::visit, and what DeviceKernels throws.
  std::byte* use(std::int64_t record, bool changes);
  void end_pass();

  /// Waits until no kernel changes a record. Throws likewise.
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
  std::vector<std::byte*> places_;               ///< of each record, where they stay
  std::deque<Used> used_;                        ///< records in files that are not let go yet, oldest first
  std::byte* current_ = nullptr;                 ///< of the last one in `used_`
  bool is_used_ = false;                         ///< a record that stays where it lies, since `passed_`
  std::unique_ptr<DeviceKernels::Mark> passed_;  ///< behind the last pass; null: nobody need wait for it
};

}  // namespace tessera
