#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "engine/memory/records/state_records.h"
#include "optim/device_kernels.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// Brings records of masters and optimizer states from the memory of a GPU's host to the GPU, which updates them, and takes them
/// back. A record goes through a slot in the GPU's memory; slots take turns. Copies run on queues of their own beside what is
/// computed, and marks keep them in order:
///
/// 1. A copy to a slot waits for the copies back of what the slot held before, and of this record's own last visit. Of records in pinned
///    memory whose order is known, it begins as soon as the slot is another's no more: while backward computes, where the order was
///    announced before it.
/// 2. What is computed in a slot waits for the copy to it, and the copy back waits for what is computed.
/// 3. Host code that visits a record (StateRecords::visit) waits for all copies back.
///
/// Records that stay in pinned memory (tier "host") have a place for good, so nothing here stops the host. Those in files are in a
/// slot of their tier while they are under way: the host waits until one is read, and puts it when its copy back has passed, at the
/// latest when its slot on the GPU is wanted again.
class StateStream {
 public:
  struct Slots {
    std::byte* memory = nullptr;  ///< of the GPU
    std::int64_t bytes = 0;       ///< of each; a multiple of 64
    std::int64_t count = 0;       ///< as many records as may be under way
    std::int64_t ahead = 0;       ///< most of them that are brought before their turn
  };

  /// `kernels` and the slots outlive this. `are_in_files`: as many records as there are slots may be held (RecordTier::most_held).
  StateStream(std::shared_ptr<StateRecords> records, DeviceKernels& kernels, const Slots& slots, bool are_in_files);
  /// Waits for what is under way; a failure is logged.
  ~StateStream();
  StateStream(const StateStream&) = delete;
  StateStream& operator=(const StateStream&) = delete;

  /// The records that go through next, in this order; the first ones are brought ahead, and those in files are read ahead. If this order
  /// was announced before and none of it has gone through, nothing happens (StateRecords::begin_pass).
  void begin_pass(std::span<const std::int64_t> order);
  /// Calls `queue` with the record's bytes on the GPU; what it queues on the current stream finds them there, and what it leaves
  /// there goes back. `changes`: else it leaves what it found, which goes back too, since marks count on it, but not to the disk. Throws as
  /// StateRecords::visit, and what DeviceKernels throws.
  void pass_through(std::int64_t record, bool changes, c10::function_ref<void(std::byte*)> queue);
  /// The same of several records that are there at once. Where it throws, the host has them as they were. REQUIRES: as many slots beside
  /// those that are brought ahead.
  void pass_through(std::span<const std::int64_t> records, bool changes,
                    c10::function_ref<void(std::span<std::byte* const>)> queue);
  void end_pass();

  /// Waits until all records are back. Throws likewise.
  void settle();

  /// How fast records that stay in pinned memory go to the GPU while as many come back, in bytes a second each way: copies records
  /// of at least `least_bytes` together, or all, there and back as they are, and waits. Not counted in `streamed_bytes`.
  /// REQUIRES: not in files.
  double measure(std::int64_t least_bytes);

  bool are_in_files() const { return are_in_files_; }
  /// Copied to the GPU so far.
  std::int64_t streamed_bytes() const { return streamed_bytes_; }

 private:
  /// On its way to its slot.
  struct Coming {
    std::int64_t record;
    std::unique_ptr<DeviceKernels::Mark> mark;
  };

  std::size_t slot_of(std::int64_t use) const { return static_cast<std::size_t>(use % slots_.count); }
  std::byte* memory_of(std::int64_t use) const {
    return slots_.memory + static_cast<std::int64_t>(slot_of(use)) * slots_.bytes;
  }
  const DeviceKernels::Mark& last_before(std::int64_t use, std::int64_t record) const;
  Coming bring(std::int64_t record, std::int64_t use, std::span<const std::byte> bytes) const;
  void bring_ahead();
  void give_up_ahead();
  std::span<std::byte> hold(std::int64_t record, bool changes);
  std::span<std::byte> arrive(std::int64_t record, std::int64_t use, bool changes);
  void turn_back(std::span<const std::int64_t> records);
  void let_go_oldest();

  const std::shared_ptr<StateRecords> records_;
  DeviceKernels& kernels_;
  const Slots slots_;
  const bool are_in_files_;
  const std::unique_ptr<DeviceKernels::Mark> made_;  ///< the slots' memory is there
  std::int64_t uses_ = 0;                            ///< of slots; use u is of slot u % count
  std::int64_t settled_ = 0;                         ///< of those, the ones whose copies back are known to have passed
  std::vector<std::unique_ptr<DeviceKernels::Mark>> back_;  ///< by slot: of its last use
  std::vector<std::int64_t> last_use_;                      ///< of each record; -1: none
  /// A record in files that is not let go yet.
  struct Leaving {
    std::int64_t record;
    bool changed;
  };
  std::deque<Leaving> leaving_;               ///< oldest first
  std::vector<std::span<std::byte>> places_;  ///< of each record in pinned memory
  std::vector<std::int64_t> order_;           ///< of this pass, where records are in pinned memory
  std::size_t passed_ = 0;                    ///< of `order_`
  std::deque<Coming> ahead_;                  ///< of `order_` from `passed_` on, for the uses from `uses_` on
  std::vector<std::span<std::byte>> here_;    ///< of the records that are there: where they lie on the host
  std::vector<std::byte*> there_;             ///< and on the GPU
  std::int64_t streamed_bytes_ = 0;
};

/// Of the records that `pool` plans, through `slots`, of which `ahead` are for records that are brought before their turn; fewer where the plan
/// has parameters come from the host, too.
std::unique_ptr<StateStream> make_state_stream(const MemoryPlan& plan, std::shared_ptr<StateRecords> records,
                                               const RecordPool& pool, std::byte* slots, std::int64_t ahead,
                                               DeviceKernels& kernels);

}  // namespace tessera
