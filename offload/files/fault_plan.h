#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

class UnsyncedFiles;

/// The places at which faults are made for tests. The n-th operation of a kind can fail, be cut short, be delayed, or
/// end the process.
///
/// Every operation of file_calls.h and of an IoRing passes a *site*. While a plan is installed (`ScopedFaults`), the
/// plan counts the operations of each site and applies its rules. A test runs once to count the operations, then once
/// for each n:
///
///     ScopedFaults counting({});
///     ... std::int64_t n = counting.plan().operations(FaultSite::kWrite);
///     ScopedFaults failing({{.site = FaultSite::kWrite, .nth = 3, .action = FaultAction::kErrno, .number = ENOSPC}});
///
/// A site costs one relaxed load of an atomic while no plan is installed.
enum class FaultSite {
  kOpen,     ///< opening or creating a file
  kReserve,  ///< reserving space on the disk for a new file
  kRead,     ///< a read, before it begins
  kWrite,    ///< a write, before it begins
  kFsync,    ///< syncing a file or folder
  kRename,   ///< renaming a file; the path is the new name
  kUnlink,   ///< removing a file, or an empty folder
  kMkdir,
  kSubmit,  ///< handing a read or write to io_uring or to the threads
  kCqe,     ///< the result of a read or write of an IoRing, before it is processed
};
inline constexpr int kNumFaultSites = 10;

/// The effect on an operation to which a rule applies.
enum class FaultAction {
  kNone,     ///< no effect: the operation is only counted
  kErrno,    ///< the operation fails with errno `number` and does nothing; at kSubmit the queue acts as if it were full
  kShort,    ///< kRead, kWrite: only `number` bytes are transferred; kCqe: the result says that `number` bytes were
             ///< transferred
  kBitFlip,  ///< kRead, kWrite: the operation succeeds, but byte `number` of the data has one wrong bit
  kTorn,     ///< kRead, kWrite: the operation reports success, but transfers only `number` sectors of 4096 bytes;
             ///< kFsync: the operation reports success, but syncs nothing
  kDelay,    ///< the operation is delayed by `number` milliseconds; not for kSubmit
  kCrash,    ///< ends the process with _exit(number), as kill -9 would
  kCall,     ///< calls the rule's `call` before the operation, which then succeeds as usual
  kDropUnsynced,  ///< a power loss: undoes changes that were not synced (UnsyncedFiles), then calls _exit(137)
};

/// Returns whether an action is possible at a site. Rules with other pairs are refused.
bool fits_together(FaultSite site, FaultAction action);

/// A rule for a fault: the site, the file, the operation, and the action.
struct FaultRule {
  FaultSite site = FaultSite::kWrite;
  std::string path = "";   ///< the rule applies to files whose name contains this text; empty: all files
  std::int64_t nth = 0;    ///< above 0: the rule applies to the n-th operation, counted from 1
  std::int64_t every = 0;  ///< above 0: the rule applies to each n-th operation. Either `nth` or `every` is set
  FaultAction action = FaultAction::kNone;
  std::int64_t number = 0;  ///< number for the action (see FaultAction); for kCrash an exit code
  /// kDropUnsynced: whether renames that were not synced are kept instead of undone (as if the folder had reached the
  /// disk before the data).
  bool keep_renames = false;
  /// kCall: a function that the plan calls at this time, for example to swap a folder. It must not pass a site itself,
  /// since the plan's mutex is locked.
  std::function<void()> call = {};
};

/// The fault that a site must make. It is never kCrash or kDropUnsynced, which the plan itself makes.
struct Fault {
  FaultAction action = FaultAction::kNone;
  std::int64_t number = 0;
};

/// The rules for faults, and counts of the operations so far. It is thread-safe.
class FaultPlan {
 public:
  explicit FaultPlan(std::vector<FaultRule> rules);
  ~FaultPlan();

  /// Returns the number of operations that passed the site since the plan was made.
  std::int64_t operations(FaultSite site) const;
  /// Returns the number of operations that a rule changed.
  std::int64_t faults() const;

  /// Counts an operation, and returns its fault. It may end the process. If several rules apply, the first of them is
  /// used.
  Fault pass(FaultSite site, std::string_view path);

  /// Returns the model of a power loss, to which every change of files is reported; null unless a rule needs it.
  UnsyncedFiles* unsynced() { return unsynced_.get(); }

 private:
  struct CountedRule {
    FaultRule rule;
    std::int64_t seen = 0;
  };
  bool applies(CountedRule& counted, FaultSite site, std::string_view path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::vector<CountedRule> rules_ ABSL_GUARDED_BY(mutex_);
  std::array<std::int64_t, kNumFaultSites> operations_ ABSL_GUARDED_BY(mutex_){};
  std::int64_t faults_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<UnsyncedFiles> unsynced_;  // only the constructor sets this pointer; the object has its own mutex
};

/// Installs a plan for the whole process while this object lives. REQUIRES: no other plan is installed, and actions
/// fit their sites (otherwise the process ends with a message). Threads that do I/O must have ended when the object is
/// destroyed; this is not checked.
class ScopedFaults {
 public:
  explicit ScopedFaults(std::vector<FaultRule> rules);
  ~ScopedFaults();
  ScopedFaults(const ScopedFaults&) = delete;
  ScopedFaults& operator=(const ScopedFaults&) = delete;

  FaultPlan& plan() { return plan_; }

 private:
  FaultPlan plan_;
};

/// The plan of the process; null if none is installed. There is one plan for each process, since operating systems and
/// tests deal with processes, while ranks may be threads of one process.
inline std::atomic<FaultPlan*> installed_fault_plan{nullptr};

/// Returns the installed plan, or null.
inline FaultPlan* fault_plan() {
  if (installed_fault_plan.load(std::memory_order_relaxed) == nullptr) return nullptr;
  return installed_fault_plan.load(std::memory_order_acquire);
}

/// Returns the fault for the next operation at a site. Call it before the operation.
inline Fault fault_at(FaultSite site, std::string_view path) {
  FaultPlan* const plan = fault_plan();
  return plan == nullptr ? Fault{} : plan->pass(site, path);
}

}  // namespace tessera
