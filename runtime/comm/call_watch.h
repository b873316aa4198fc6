#pragma once

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <pthread.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/call_order.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/key_value_store.h"
#include "runtime/comm/published_call.h"

namespace tessera {

/// The ranks of a group in the world: first, first + stride, ...
struct GroupRanks {
  int first = 0, count = 1, stride = 1;
};

/// Why the ranks end that wait for each other, once it is known. Thread-safe.
class CallVerdict {
 public:
  void set(const absl::Status& verdict) {
    const MutexLock lock(mutex_);
    if (verdict_.ok()) verdict_ = verdict;
  }
  /// The cause of a call's `failure`: one that comes after the verdict is what another rank's end looks like from here.
  absl::Status cause_of(const absl::Status& failure) const {
    const MutexLock lock(mutex_);
    return failure.ok() || verdict_.ok() ? failure : verdict_;
  }

 private:
  mutable Mutex mutex_;
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);
};

/// What the program does with one group, for the watch, which looks from another thread; an observer of ObservedCollectives. A call writes
/// some 20 words that no other rank reads, and takes no lock.
class GroupCalls {
 public:
  /// The rank begins to make the group: that is what it is in, until it `leaves` call 0.
  GroupCalls(std::string name, std::string family, const GroupRanks& ranks, std::shared_ptr<const CallVerdict> verdict);

  std::uint64_t begins(CallSignature call);
  void waits(std::uint64_t call) { enter(call); }
  void leaves(std::uint64_t, const absl::Status&, bool) { place_.store(0, std::memory_order_release); }
  absl::Status cause_of(const absl::Status& failure) const { return verdict_->cause_of(failure); }
  void aborted(const absl::Status&) {}
  void ends() { is_made_of(nullptr); }

  /// `group`: whose calls they are, as long as it lives; or null.
  void is_made_of(const Collectives* group);

  /// Where the program, or the device that makes its calls, is in a call of the group; 0: in none. A number that comes again is the same
  /// stay in the same call.
  std::uint64_t place() const;
  /// The call there. If the program has left it meanwhile, another one of the group.
  WaitReport::Wait describe(std::uint64_t place) const;
  WaitReport::Group report() const;
  bool lives() const;
  const std::string& name() const { return name_; }

 private:
  static constexpr std::size_t kKept = 64;     ///< calls; more than can be under way
  static constexpr std::size_t kReported = 8;  ///< of these
  static constexpr std::size_t kThreads = 4;   ///< that are remembered

  void enter(std::uint64_t call);
  void note_thread(int thread, bool forget_others);
  std::string text_of(const CallSignature& call) const;

  const std::string name_, family_;
  const GroupRanks ranks_;
  const std::shared_ptr<const CallVerdict> verdict_;
  std::atomic<std::uint64_t> begun_ = 0, entered_ = 0;
  std::atomic<std::uint64_t> place_ = 0;  ///< entered_ << 8 | call % kKept << 1 | 1; a device's: call << 1
  std::atomic<int> thread_ = 0;           ///< that entered last
  std::array<std::atomic<int>, kThreads> threads_{};
  std::array<PublishedCall, kKept> calls_{};
  mutable Mutex mutex_;
  const Collectives* group_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

/// What somebody has found of the calls that this process makes by another library, by which the same ranks talk: how far it has come in its
/// groups, and in which calls threads wait since CallWatch::kLong. Python's package looks at torch.distributed.
struct OutsideCalls {
  std::map<std::string, WaitReport::Group> groups;
  std::vector<WaitReport::Wait> waits;
};

/// Notices that ranks wait for each other in different calls, in whichever groups and over whichever transport.
///
/// A thread of the rank looks twice a second, in this rank's memory, whether the program is in one call since 3 s. Only then ranks talk, through
/// the store: each writes its WaitReport under "waits/RANK" and reads those of others, of all in a small world, of neighbours in a large
/// one. Who finds the same disagreement twice in a row (disagreement_of) writes it under "waits/verdict", and every rank that waits ends
/// with it: `report` is called with the error of this rank. A rank that goes on takes back what it wrote. A rank that computes says
/// nothing, and is never accused.
///
/// The store may stand still with the rank that serves it: nobody waits for it longer than ask_in_time does. Where the program does not come
/// out of its call after `report`, as its transport cannot be ended, the process ends with the error.
class CallWatch {
 public:
  using Report = std::function<void(const absl::Status& reason)>;

  /// `report`: any thread; at most once. Not called after the destructor.
  CallWatch(int rank, int world_size, std::shared_ptr<KeyValueStore> store, Report report);
  ~CallWatch();

  /// What `make` makes, watched from when the rank begins to make it. Groups of one rank, and of a world that is not there, are not.
  /// `family`: as WaitReport::Group.
  absl::StatusOr<std::shared_ptr<Collectives>> watched(
      const std::string& name, const std::string& family, const GroupRanks& ranks,
      absl::FunctionRef<absl::StatusOr<std::shared_ptr<Collectives>>()> make);

  static constexpr std::chrono::seconds kLong{3};  ///< a wait that ranks talk about

  /// Whether this rank waits for so long in a watched call, and calls of another library are of interest. Any thread.
  bool waits() const { return waits_; }
  /// What is so now; it counts for two seconds. Any thread. REQUIRES: what is said of groups was found out while this rank waited.
  void tell(OutsideCalls calls);
  /// The number of a thread of this process in reports.
  static int number_of(pthread_t thread);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::shared_ptr<GroupCalls> calls;
    std::uint64_t place = 0;  ///< when it was looked at last
    Clock::time_point since = {};
  };
  struct Exchange;

  void run();
  /// False once there is nothing more to look for.
  bool look();
  bool waits_long();
  bool hears_of_outside() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void forget_old_groups() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  WaitReport report();
  bool is_due();
  void take_back();
  bool connect();
  bool ask(const std::shared_ptr<Exchange>& exchange);
  void end_with(const absl::Status& verdict);
  /// False where the watch ends meanwhile.
  bool pause(std::chrono::milliseconds time);
  std::vector<int> others() const;

  const int rank_, world_size_;
  const std::shared_ptr<KeyValueStore> store_;
  const Report report_;
  const pid_t process_;
  const std::shared_ptr<CallVerdict> verdict_ = std::make_shared<CallVerdict>();

  Mutex mutex_;
  CondVar changed_;
  std::vector<Watched> watched_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  OutsideCalls outside_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point told_ ABSL_GUARDED_BY(mutex_) = {};

  std::atomic<bool> waits_ = false;

  // The thread's own.
  std::shared_ptr<KeyValueStore> connection_;  ///< to the store, where the program may wait; null: none was needed yet
  std::string published_, found_;
  std::optional<Clock::time_point> exchanging_since_;
  Clock::time_point last_exchange_ = {};
  std::thread thread_;
};

}  // namespace tessera
