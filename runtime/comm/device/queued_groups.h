#pragma once

#include <absl/status/status.h>

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

/// The queued groups of one rank. They end together: a device that stands still in a call of one comes to no call of
/// another, and an abort of one may wait for the other's.
class QueuedGroups {
 public:
  struct Member {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::function<void(const absl::Status& failure)> tell;  ///< tells the group's other ranks; owns what it uses
  };
  using Place = std::list<Member>::iterator;
  Place add(Member member);
  void remove(Place place);

  /// Ok, or why they ended. Known before a backend is aborted, and so before the device goes on to worthless results.
  absl::Status status() const;

  /// The first failure counts: all members' peers are told of it, then all backends aborted. If one cannot be, the device,
  /// and whoever waits for it, would stand still for ever: then the process ends, with the failure's exit code. Later
  /// callers wait until that is done.
  void end(const absl::Status& failure);

 private:
  mutable std::mutex mutex_;
  absl::Status status_;
  bool have_ended_ = false;
  std::condition_variable changed_;
  std::list<Member> members_;
};

}  // namespace tessera
