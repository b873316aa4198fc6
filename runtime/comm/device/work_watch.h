#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "runtime/base/mutex.h"
#include "runtime/comm/call.h"

namespace tessera {

/// Watches calls that a device runs asynchronously, since the thread that started them does not wait for them. The
/// watch's own thread notices a call that fails or hangs. A call's time begins when the device has reached it and the
/// call before it is over. Many steps of computation may be queued before a call, and a call that waits behind them
/// does not hang.
class WorkWatch {
 public:
  /// A function that gets the failed call, and a text with the reason. It is called at most once, on the watch's
  /// thread. Nothing is watched afterwards.
  using Report = std::function<void(const CallSignature& call, const std::string& why)>;

  /// `timeout` is a call's limit. `news` is called now and then while a call takes long. It returns a text if peers
  /// have failed, or else "". The watch's thread works on `device`.
  WorkWatch(std::chrono::duration<double> timeout, c10::Device device, std::function<std::string()> news,
            Report report);
  /// Waits for a report that is being made, but not for calls under way.
  ~WorkWatch();

  /// Announces a call before it is started, since starting it may already wait for peers. Calls end in the order in
  /// which they are added. `reached` returns whether the device has reached the call's place in the queue.
  void add(const CallSignature& call, std::function<bool()> reached);
  /// Takes the work of the call that the latest `add` announced. `work` is null if the call could not be started.
  void set_latest(c10::intrusive_ptr<c10d::Work> work);
  /// Waits until all calls are over, or one has been reported.
  void drain();
  /// Returns the number (CallSignature::sequence) of the call that the device has reached and not finished. 0 means
  /// that there is none.
  std::uint64_t stands_in() const { return stands_in_.load(std::memory_order_relaxed); }

 private:
  struct Started {
    CallSignature call;
    std::function<bool()> reached;
    c10::intrusive_ptr<c10d::Work> work;  ///< null while the call is being started
  };

  void run();
  /// Returns false if the watch ends during the pause.
  bool pause(std::chrono::duration<double> time);
  /// Returns a text that describes the fault of the oldest call, or "" if it has none. Removes finished calls from the
  /// list.
  std::string look();

  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> timeout_;
  const c10::Device device_;
  const std::function<std::string()> news_;
  const Report report_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Started> started_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false, has_reported_ ABSL_GUARDED_BY(mutex_) = false;
  Clock::time_point oldest_since_, next_question_;  // only the watch's thread uses these two
  std::atomic<std::uint64_t> stands_in_ = 0;
  std::thread thread_;  // the last member is destroyed first, since it uses the other members
};

}  // namespace tessera
