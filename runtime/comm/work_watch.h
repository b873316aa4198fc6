#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "runtime/comm/call.h"

namespace tessera {

/// Looks after calls that a device runs on its own, on a thread of its own, since whoever started them has gone on: one
/// that fails, or stands still. A call's time begins when the one before it is over, as one that waits behind others
/// (or behind compute, many steps of which may be queued) does not stand still.
class WorkWatch {
 public:
  /// What went wrong and in which call. Called at most once, on the watch's thread; after that nothing is watched.
  using Report = std::function<void(const CallSignature& call, const std::string& why)>;

  /// `timeout`: for a call. `peer_failed` is asked now and then while a call is under way.
  WorkWatch(std::chrono::duration<double> timeout, std::function<bool()> peer_failed, Report report);
  /// Does not wait for calls under way, but for a report.
  ~WorkWatch();

  /// Calls end in the order in which they are added.
  void add(const CallSignature& call, c10::intrusive_ptr<c10d::Work> work);

 private:
  struct Started {
    CallSignature call;
    c10::intrusive_ptr<c10d::Work> work;
  };

  void run();
  /// What is wrong with the oldest call, if anything; takes those that are over off the list.
  std::string look();

  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> timeout_;
  const std::function<bool()> peer_failed_;
  const Report report_;
  std::mutex mutex_;  // guards the two below
  std::condition_variable changed_;
  std::deque<Started> started_;
  bool ends_ = false;
  Clock::time_point oldest_since_, next_question_;  // the thread's own
  std::thread thread_;                              // last: it uses the others
};

}  // namespace tessera
