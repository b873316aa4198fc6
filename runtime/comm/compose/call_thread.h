#pragma once

#include <absl/status/status.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

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

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<absl::Status()>> waiting_;
  std::size_t left_ = 0;  ///< that have not ended
  bool ends_ = false;
  std::jthread thread_;  // last: it is joined first
};

}  // namespace tessera
