#pragma once

#include <absl/status/status.h>

#include <functional>
#include <thread>

#include "runtime/base/mutex.h"

namespace tessera {

/// The thread with which a ServedJob writes changed shards to the disk. `wake` and `failure` may be called by any
/// thread, also by one that holds a shard's mutex.
class KeepingThread {
 public:
  /// Writes what is due; with `is_last`, all that is not on the disk yet.
  using Keep = std::function<absl::Status(bool is_last)>;

  /// Starts the thread. It calls `keep` after each `wake`, until one call fails.
  explicit KeepingThread(Keep keep);
  /// Calls `keep` for the last time, unless it has failed before.
  ~KeepingThread();
  KeepingThread(const KeepingThread&) = delete;
  KeepingThread& operator=(const KeepingThread&) = delete;

  /// Says that something is due.
  void wake();
  /// Returns the error with which `keep` has failed. After it nothing is written any more.
  absl::Status failure() const;

 private:
  void run();

  const Keep keep_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool is_due_ ABSL_GUARDED_BY(mutex_) = false, is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;  // the thread is the last member, so that it starts last
};

}  // namespace tessera
