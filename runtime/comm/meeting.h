#pragma once

#include <absl/status/status.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/comm/group.h"
#include "runtime/comm/shared_space.h"

namespace tessera {

/// Sets the rank's state for its peers to see and wakes those who wait. The first call for a rank counts.
/// `between_processes`: as SharedSpace. Safe from any thread.
void mark_failed(GroupBlock& group, RankBlock& rank, const absl::Status& reason, bool between_processes);
void mark_left(GroupBlock& group, RankBlock& rank, bool between_processes);

/// Where the ranks of a shared-memory group wait for one another: a barrier whose phases are numbered from 1.
/// Everything a rank wrote before it entered phase k, every rank sees once phase k is over.
///
/// Each rank writes its own arrival and reads its peers'; no word is written by two ranks. A phase is over when all
/// have arrived. That alone would let a rank go on while another, whose patience ended a moment before the last
/// arrival, gives up; so who would give up raises a doubt first, and then the phase is put to the vote
/// (GroupBlock::verdict): it is over on all ranks, or on none.
///
/// Waiting spins for some microseconds, yielding its core now and then (at every look where ranks outnumber cores),
/// then sleeps in slices of 50 ms; after each slice it asks whether the missing ranks still live, have left or failed,
/// and whether time is up.
///
/// One thread at a time calls `start` and `meet`; `fail` and `status` are for any thread. After the first
/// failure every `meet` returns it.
class Meeting {
 public:
  Meeting(const Group& group, SharedSpace& space);

  /// A new call begins: messages name it, and its patience (timeout_s) begins anew.
  void start(const CallSignature& call);
  /// Makes `call` known to whoever is in the next phase with us.
  void publish(const CallDescriptor& call);
  /// Enters the next phase and waits until every rank has.
  absl::Status meet();

  /// What ranks published for the phase just over.
  bool all_published_the_same() const;
  CallSignature call_of(int rank) const { return blocks_[rank]->calls[phase_ & 1].load(); }
  Location input_of(int rank) const;
  Location output_of(int rank) const;

  /// Between them this rank may read and write its peers' buffers: a peer that fails meanwhile returns to its caller,
  /// who may free them, only afterwards. (A process does not wait: its peers' mappings stay.) Fails, without having
  /// begun, if the group has.
  absl::Status begin_access();
  void end_access();

  /// 0 or 1: the parity of the phase that the next `meet` enters.
  int next_parity() const { return static_cast<int>((phase_ + 1) & 1); }

  /// Makes `reason` this rank's end, known to all; returns the failure that counts, which is the first.
  absl::Status fail(const absl::Status& reason);
  absl::Status status() const;
  void leave();

  /// "rank 1/4 blocks.3 reduce_scatter #412: "
  std::string prefix() const;
  /// "rank 2 (pid 4711)"
  std::string who(int rank) const;

 private:
  Arrival& own_arrival() const { return self().arrivals[phase_ & 1]; }
  bool arrived(int rank) const;
  bool complete() const;
  bool spin() const;
  void sleep() const;
  absl::Status wait();
  bool vote(bool over) const;
  absl::Status reason_of_loss();
  void wait_for_access_to_end() const;
  absl::Status look_at_peers(bool slept) const;
  absl::Status failure_of(int rank) const;
  absl::Status timeout_error() const;
  std::vector<int> missing() const;
  std::string last_seen(int rank) const;
  RankBlock& self() const { return *blocks_[group_.rank]; }

  const Group& group_;
  SharedSpace& space_;
  GroupBlock& group_block_;
  std::vector<RankBlock*> blocks_;  // of all ranks
  const int looks_per_yield_;
  std::uint64_t phase_ = 0;
  CallSignature call_;
  bool timed_ = false;  // deadline_ is that of call_: set when first a wait is long
  std::chrono::steady_clock::time_point deadline_;
  mutable std::mutex mutex_;
  absl::Status failure_;  // guarded by mutex_
};

}  // namespace tessera
