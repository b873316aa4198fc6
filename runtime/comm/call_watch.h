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
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/call_order.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/key_value_store.h"
#include "runtime/comm/published_call.h"
#include "runtime/comm/rank_watch.h"

namespace tessera {

/// The ranks of a group, as numbers in the world: first, first + stride, ...
struct GroupRanks {
  int first = 0, count = 1, stride = 1;
};

/// The reason for which waiting ranks are ended, if they wait for each other. It is empty until the reason is known. It
/// is thread-safe.
class CallVerdict {
 public:
  void set(const absl::Status& verdict) {
    const MutexLock lock(mutex_);
    if (verdict_.ok()) verdict_ = verdict;
  }
  /// Returns the cause of a call's `failure`. A failure after the verdict only shows that another rank has ended, so
  /// the verdict is the cause of that failure.
  absl::Status cause_of(const absl::Status& failure) const {
    const MutexLock lock(mutex_);
    return failure.ok() || verdict_.ok() ? failure : verdict_;
  }

 private:
  mutable Mutex mutex_;
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);
};

/// Records a program's use of one group. CallWatch reads the record from another thread. It is an observer of
/// ObservedCollectives. A call writes about 20 words of memory that no other rank reads, and takes no lock.
class GroupCalls {
 public:
  /// The rank begins to make the group. It counts as being in call 0 until `leaves` is called for call 0.
  GroupCalls(std::string name, std::string family, const GroupRanks& ranks, std::shared_ptr<const CallVerdict> verdict);

  std::uint64_t begins(CallSignature call);
  void waits(std::uint64_t call) { enter(call); }
  void leaves(std::uint64_t, const absl::Status&, bool) { place_.store(0, std::memory_order_release); }
  absl::Status cause_of(const absl::Status& failure) const { return verdict_->cause_of(failure); }
  void aborted(const absl::Status&) {}
  void ends() { is_made_of(nullptr); }

  /// Sets the group whose calls this object records. It is called with null when that group ends.
  void is_made_of(Collectives* group);

  /// Returns a number for the group's call in which the program, or the device that makes its calls, is now. 0 means no
  /// call. An unchanged number means that the program is still in the same call.
  std::uint64_t place() const;
  /// Returns the call at `place`. If the program has already left that call, returns another call of the group.
  WaitReport::Wait describe(std::uint64_t place) const;
  WaitReport::Group report() const;
  bool lives() const;
  /// Ends the call if a rank of the group has failed (Collectives::end_if_left_alone). Returns whether it ended the
  /// call.
  bool end_if_left_alone(Collectives::HasKey has_key);
  const std::string& name() const { return name_; }

 private:
  static constexpr std::size_t kKept = 64;     ///< number of calls that are kept; fewer are under way
  static constexpr std::size_t kReported = 8;  ///< largest number of calls in a report
  static constexpr std::size_t kThreads = 4;   ///< number of threads that are remembered

  void enter(std::uint64_t call);
  void note_thread(int thread, bool forget_others);
  std::string text_of(const CallSignature& call) const;

  const std::string name_, family_;
  const GroupRanks ranks_;
  const std::shared_ptr<const CallVerdict> verdict_;
  std::atomic<std::uint64_t> begun_ = 0, entered_ = 0;
  std::atomic<std::uint64_t> place_ = 0;  ///< entered_ << 8 | call % kKept << 1 | 1; for a device's call: call << 1
  std::atomic<int> thread_ = 0;           ///< thread that entered a call last
  std::array<std::atomic<int>, kThreads> threads_{};
  std::array<PublishedCall, kKept> calls_{};
  mutable Mutex mutex_;
  Collectives* group_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

/// The known facts about this process's calls of another library, over which the same ranks communicate too. The facts
/// say how far the process is in that library's groups, and in which of its calls threads have waited
/// for CallWatch::kLong. The Python package gets these facts from torch.distributed.
struct OutsideCalls {
  std::map<std::string, WaitReport::Group> groups;
  std::vector<WaitReport::Wait> waits;
};

/// The latest news of OutsideCalls. It is stale after two seconds, which is less than CallWatch::kLong.
class OutsideNews {
 public:
  void tell(OutsideCalls calls) {
    calls_ = std::move(calls);
    told_ = Clock::now();
  }
  /// Returns the calls; null if the news is stale.
  const OutsideCalls* calls() const { return Clock::now() - told_ < std::chrono::seconds(2) ? &calls_ : nullptr; }
  bool has_waits() const {
    const OutsideCalls* const calls = this->calls();
    return calls && !calls->waits.empty();
  }

 private:
  using Clock = std::chrono::steady_clock;
  OutsideCalls calls_;
  Clock::time_point told_ = {};
};

/// Notices that ranks wait for each other in different calls (deadlock), in any group and over any transport. The
/// MeshGroups of a rank has one CallWatch.
///
/// A thread of the rank looks twice a second, in this rank's memory, whether the program has been in one call for 3 s.
/// Only then do ranks communicate, through the store. Each one writes its WaitReport under "waits/RANK" and reads other
/// ranks' reports: all reports in a small world, and those of neighbours and of rank 0 in a large world. A rank that
/// finds the same disagreement twice in a row (disagreement_of) writes it under "waits/verdict". Every waiting rank
/// then ends with this verdict: `report` is called with the error of this rank. A rank whose call has ended removes its
/// report from the store. A rank that computes reports nothing, and is never accused.
///
/// The store may hang with the rank that serves it. No thread waits for the store longer than ask_in_time does. If the
/// program does not leave its call after `report`, because its transport cannot be ended, the process ends with the
/// error.
///
/// A call may also take long because a rank has failed and the network library has not noticed the end of the rank's
/// connection. CallWatch therefore ends a group if one of its ranks has written to the store that it failed
/// (Collectives::end_if_left_alone). A rank that was killed writes nothing. If ranks communicate over Gloo or MPI, the
/// rank before the killed rank notices the end of the killed process (RankWatch) and writes this to the store. If the
/// killed rank served the store, the end of the store shows that this rank is gone. The end of ranks whose host
/// vanishes is noticed in the same ways. In worlds of at most 64 ranks, all ranks watch rank 0. Rank 0 mostly serves
/// the store, and once it has ended, no rank can ask the store about it.
///
/// A rank that ends without an error tells the ranks that watch it how many calls it has begun. They use this number
/// once the rank's process has ended, since destructors may make calls. Calls that the rank has begun are not ended. If
/// another rank waits in a call that the ended rank has not begun, the wait would never end, so this is a disagreement
/// too. The ranks that watched the ended rank watch the rank behind it from then on.
class CallWatch {
 public:
  using Report = std::function<void(const absl::Status& reason)>;

  /// `report` is called from any thread, at most once, and not after the destructor.
  CallWatch(int rank, int world_size, const std::shared_ptr<KeyValueStore>& store, Report report);
  ~CallWatch();

  /// Lets an outage of the network last this long: a host that has vanished counts as gone only after this time. Call
  /// it before the first group is made.
  void bear_outages(double seconds) { ranks_.bear_outages(seconds); }

  /// Returns the group that `make` makes, watched from the moment when the rank begins to make it. Groups of one rank,
  /// and of a fake world, are not watched. `family` is that of WaitReport::Group.
  absl::StatusOr<std::shared_ptr<Collectives>> watched(
      const std::string& name, const std::string& family, const GroupRanks& ranks,
      absl::FunctionRef<absl::StatusOr<std::shared_ptr<Collectives>>()> make);

  /// Ranks communicate about waits that take this long.
  static constexpr std::chrono::seconds kLong = RankWatch::kForLastCalls;

  /// Returns whether this rank has waited for kLong in a watched call. If so, the caller passes the state of another
  /// library's calls to `tell`. Any thread may call it.
  bool waits() const { return waits_; }
  /// Tells the ranks that watch this rank that its program is about to end well. A later call of this function replaces
  /// the numbers of an earlier one. Any thread may call.
  void tell_end() const;
  /// Runs `questions` with `store` as ask_in_time does, for at most `limit`. It does not count as a call of a group.
  /// `store` is a connection to the job's store. If the store does not answer, and its host has vanished, this function
  /// returns false before the limit. Any thread may call.
  bool ask_store(const std::shared_ptr<KeyValueStore>& store, std::function<void(KeyValueStore&)> questions,
                 std::chrono::milliseconds limit);
  /// Takes the current state of another library's calls; this state is used for two seconds. Any thread may call.
  /// REQUIRES: the groups' state was read while this rank waited.
  void tell(OutsideCalls calls);
  /// Returns the number of a thread of this process in reports.
  static int number_of(pthread_t thread);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::shared_ptr<GroupCalls> calls;
    std::uint64_t place = 0;  ///< result of place() at the last `look`
    Clock::time_point since = {};
  };
  class Reports;  // the exchange of reports with other ranks

  void run();
  /// Returns false after there is nothing more to look for.
  bool look();
  bool waits_long();
  /// Ends calls that have taken long because a rank in them has failed.
  void end_lonely_calls();
  void forget_old_groups() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  WaitReport report();
  void take_back();
  void end_with(const absl::Status& verdict);
  /// Returns false if the watch ends during the pause.
  bool pause(std::chrono::milliseconds time);

  const int rank_, world_size_;
  const Report report_;
  const pid_t process_;
  const std::shared_ptr<CallVerdict> verdict_ = std::make_shared<CallVerdict>();

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Watched> watched_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  OutsideNews outside_ ABSL_GUARDED_BY(mutex_);

  std::atomic<bool> waits_ = false;
  std::atomic<int> questions_ = 0;                ///< number of threads in ask_store
  std::atomic<bool> store_has_vanished_ = false;  ///< true: a host is gone, so threads in ask_store wait in vain

  // Only the watch's thread uses the members below, except `ranks_` (also in tell_end and bear_outages) and `thread_`.
  OwnConnection connection_;
  RankWatch ranks_;
  const std::unique_ptr<Reports> reports_;
  std::string found_;  ///< the disagreement that the latest exchange has found; "": none
  std::thread thread_;
};

}  // namespace tessera
