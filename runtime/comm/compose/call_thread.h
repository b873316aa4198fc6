#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <thread>

#include "runtime/base/mutex.h"

namespace tessera {

/// Runs calls one after the other, in the order in which they are pushed, on a thread that begins with the first of them. The destructor
/// waits for those that were pushed. Thread-safe.
class CallThread {
 public:
  CallThread() = default;
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  /// `call` does not throw.
  std::future<absl::Status> push(std::function<absl::Status()> call);
  /// Until all that were pushed have ended.
  void wait_for_all();

 private:
  void run();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::packaged_task<absl::Status()>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::size_t left_ ABSL_GUARDED_BY(mutex_) = 0;  ///< that have not ended
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::jthread thread_;  // last: it is joined first
};

}  // namespace tessera
