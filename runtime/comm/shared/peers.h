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

/// Sets the rank's state for its peers to see and wakes those who wait. The first call for a rank counts.
/// `between_processes`: as SharedSpace. Safe from any thread.
void mark_failed(GroupBlock& group, RankBlock& rank, const absl::Status& reason, bool between_processes);
void mark_left(GroupBlock& group, RankBlock& rank, bool between_processes);

/// The other ranks of a shared-memory group as one rank sees them: waiting for them, noticing that one is gone or gave
/// up, telling them that this one did.
///
/// One thread at a time calls `start` and `wait`; `fail`, `status` and `wake` are for any thread.
class Peers {
 public:
  Peers(const Group& group, SharedSpace& space);

  /// A new call begins: messages name it, and its patience (timeout_s) begins anew.
  void start(const CallSignature& call);

  /// Called for a rank; says whether it has come to where we wait for it.
  using Arrived = absl::FunctionRef<bool(int rank)>;
  /// Sleeps until all have arrived, in slices of 50 ms; after each it asks whether the missing ranks still live, have
  /// left or failed, and whether time is up. An error is a reason to give up, and has not been told to anyone.
  absl::Status wait(Arrived arrived);
  /// Wakes those who sleep. To be called after an arrival that others may wait for.
  void wake();
  bool anyone_sleeps() const { return group_block_.sleepers.load() > 0; }

  /// Why a peer gave up. REQUIRES: a peer did; it has said why, or is about to say it.
  absl::Status reason_of_loss();

  /// Between these two calls this rank may read and write its peers' buffers. A peer that fails meanwhile waits for
  /// end_access before it returns to its caller, who may then free the buffers. (A rank that is a process does not wait,
  /// since its peers keep their mappings.) begin_access fails, and nothing may be accessed, if the group has failed.
  absl::Status begin_access();
  void end_access();
  /// To be called before this rank frees buffers that peers may be about to read. Peers do not begin to read them then;
  /// they fail with the error that ends this rank.
  void withdraw();

  /// Makes `reason` this rank's end, known to all; returns the failure that counts, which is the first.
  absl::Status fail(const absl::Status& reason);
  absl::Status status() const;
  /// Ok, or the failure that counts.
  absl::Status failure() const;
  void leave();

  int rank() const { return group_.rank; }
  int size() const { return group_.size(); }
  /// Ranks outnumber the cores this one may use.
  bool outnumber_cores() const { return outnumber_cores_; }
  /// "rank 1/4 blocks.3 reduce_scatter #412: "
  std::string prefix() const;
  /// "rank 2 (pid 4711)"
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
  std::vector<RankBlock*> blocks_;  // of all ranks
  const bool outnumber_cores_;
  CallSignature call_;
  bool timed_ = false;  // deadline_ is that of call_: set when first a wait is long
  std::chrono::steady_clock::time_point deadline_;
  mutable Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
