#pragma once

#include <absl/status/status.h>

#include <functional>
#include <list>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/base/mutex.h"

namespace tessera {

/// The asynchronous groups of one rank. They end together, since a device that hangs in a call of one group never
/// reaches the calls of another. Aborting one group may wait until the other groups are aborted too. This class is
/// thread-safe.
class QueuedGroups {
 public:
  struct Member {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::function<void(const absl::Status& failure)> tell;  ///< tells the group's other ranks; it owns all that it uses
  };
  using Place = std::list<Member>::iterator;
  Place add(Member member);
  void remove(Place place);

  /// Returns OK, or why the groups ended. The reason is known before a backend is aborted, and so before the device
  /// continues with worthless results.
  absl::Status status() const;

  /// Ends all groups. Only the first failure counts: the peers of all groups are told of it, then all backends are
  /// aborted. If a backend cannot be aborted, the device and all threads that wait for it would hang for ever, so the
  /// process ends with the failure's exit code. Later callers wait until all of this is done.
  void end(const absl::Status& failure);

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool have_ended_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar changed_;
  std::list<Member> members_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
