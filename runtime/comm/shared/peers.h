#pragma once

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>

#include <chrono>
#include <string>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/group.h"
#include "runtime/comm/shared/shared_space.h"

namespace tessera {

/// Sets the rank's state, which its peers see, and wakes the ranks that wait. Only the first call for a rank counts.
/// `between_processes` has the meaning of SharedSpace::between_processes. Any thread may call these functions.
void mark_failed(GroupBlock& group, RankBlock& rank, const absl::Status& reason, bool between_processes);
void mark_left(GroupBlock& group, RankBlock& rank, bool between_processes);

/// The other ranks of a shared-memory group as one rank sees them. This class waits for the other ranks, notices that a
/// rank is gone or gave up, and tells the other ranks that this rank gave up.
///
/// One thread at a time calls `start` and `wait`; any thread may call `fail`, `status` and `wake`.
class Peers {
 public:
  Peers(const Group& group, SharedSpace& space);

  /// Begins a new call: messages name this call, and its time limit (timeout_s) starts again.
  void start(const CallSignature& call);

  /// Returns whether a rank has arrived at the point where this rank waits for the other ranks.
  using Arrived = absl::FunctionRef<bool(int rank)>;
  /// Sleeps until all ranks have arrived, in slices of 50 ms. After each slice it checks whether the missing ranks
  /// still live, whether a rank has left or failed, and whether the time limit has passed. An error is a reason to give
  /// up. No other rank has been told of it yet.
  absl::Status wait(Arrived arrived);
  /// Wakes the ranks that sleep. Call it after an arrival that other ranks may wait for.
  void wake();
  bool anyone_sleeps() const { return group_block_.sleepers.load() > 0; }

  /// Returns the reason for which a peer gave up. REQUIRES: a peer gave up, and it has given its reason or is about to
  /// give it.
  absl::Status reason_of_loss();

  /// Allows this rank to read and write its peers' buffers until end_access. A peer that fails meanwhile waits for
  /// end_access before it returns to its caller. The caller may then free the buffers. (A rank that is a process does
  /// not wait, since its peers keep their mappings.) begin_access fails, and nothing may be accessed, if the group has
  /// failed.
  absl::Status begin_access();
  void end_access();
  /// Call it before this rank frees buffers that peers may be about to read. Peers do not begin to read the buffers
  /// then. They fail with the error that ends this rank.
  void withdraw();

  /// Ends this rank with `reason`, and tells all ranks. Returns the first failure, which is the one that counts.
  absl::Status fail(const absl::Status& reason);
  absl::Status status() const;
  /// Returns OK, or the first failure.
  absl::Status failure() const;
  void leave();

  int rank() const { return group_.rank; }
  int size() const { return group_.size(); }
  /// Returns whether there are more ranks than cores that this rank may use.
  bool outnumber_cores() const { return outnumber_cores_; }
  /// Returns a text such as "rank 1/4 blocks.3 reduce_scatter #412: "
  std::string prefix() const;
  /// Returns a text such as "rank 2 (pid 4711)".
  std::string who(int rank) const;

 private:
  bool all(Arrived arrived) const;
  void sleep(Arrived arrived) const;
  void wait_for_access_to_end() const;
  std::vector<int> missing(Arrived arrived) const;
  absl::Status look(bool slept, Arrived arrived) const;
  absl::Status failure_of(int rank) const;
  absl::Status timeout_error(Arrived arrived) const;
  std::string last_seen(int rank) const;
  RankBlock& self() const { return *blocks_[group_.rank]; }

  const Group& group_;
  SharedSpace& space_;
  GroupBlock& group_block_;
  std::vector<RankBlock*> blocks_;  // one block for each rank
  const bool outnumber_cores_;
  CallSignature call_;
  bool timed_ = false;  // whether deadline_ belongs to call_; the first long wait of a call sets it
  std::chrono::steady_clock::time_point deadline_;
  mutable Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
