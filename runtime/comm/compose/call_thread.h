#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <thread>

#include "runtime/base/mutex.h"

namespace tessera {

/// Runs calls one after the other, in the order in which they are pushed. They run on a thread that starts with the
/// first call. The destructor waits for all pushed calls. This class is thread-safe.
class CallThread {
 public:
  CallThread() = default;
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  /// Queues `call`, which must not throw. The future gets the status that `call` returns.
  std::future<absl::Status> push(std::function<absl::Status()> call);
  /// Waits until all pushed calls have ended.
  void wait_for_all();

 private:
  void run();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::packaged_task<absl::Status()>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::size_t left_ ABSL_GUARDED_BY(mutex_) = 0;  ///< number of calls that have not ended
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::jthread thread_;  // the thread is the last member, so it is joined first
};

}  // namespace tessera
