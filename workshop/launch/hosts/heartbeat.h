#pragma once

#include <absl/base/thread_annotations.h>

#include <chrono>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

/// Tells the agents on other hosts that the launcher is alive. A separate thread writes to all agents. The launcher's
/// own thread waits while nobody reads its output (`| less`). The agents must not conclude that the launcher is dead in
/// this case.
///
/// A heartbeat is a frame so small that a pipe takes it whole or not at all. So it never lies inside another frame.
class Heartbeat {
 public:
  explicit Heartbeat(std::chrono::milliseconds every) : every_(every) {}
  /// Ends the thread.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// Writes to `pipe` from now on, until `remove` is called. The pipe must not block; bytes that it does not take are
  /// left out.
  void add(int pipe);
  /// Ends the writes to `pipe`, and returns when no write is under way any more.
  void remove(int pipe);

 private:
  void run();

  const std::chrono::milliseconds every_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<int> pipes_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  ///< the thread starts with the first pipe
};

}  // namespace tessera
