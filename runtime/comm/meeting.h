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

/// Where the ranks of a shared-memory group wait for one another: a central barrier whose phases are numbered
/// from 1. Everything a rank wrote before it entered phase k, every rank sees once phase k is over.
///
/// Waiting spins for some microseconds (not at all where ranks outnumber cores), then sleeps in slices of 50
/// ms; after each slice it asks whether the missing ranks still live, have left or failed, and whether time
/// is up.
///
/// One thread at a time calls `start` and `meet`; `fail` and `status` are for any thread. After the first
/// failure every `meet` returns it.
class Meeting {
 public:
  Meeting(const Group& group, SharedSpace& space);

  /// A new call begins: messages name it, and its time runs from now.
  void start(const CallSignature& call);
  /// Makes `call` known to whoever is in the next phase with us.
  void publish(const CallDescriptor& call);
  /// Enters the next phase and waits until every rank has.
  absl::Status meet();
  /// What `rank` published for the phase just over.
  CallDescriptor published_by(int rank) const;

  /// Between them this rank may read its peers' buffers: a peer that fails meanwhile returns to its caller,
  /// who may free them, only afterwards. Fails, without having begun, if the group has.
  absl::Status begin_reading();
  void end_reading();

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
  bool over() const;
  bool spin() const;
  void sleep() const;
  absl::Status wait();
  bool close_phase();
  void wait_for_readers() const;
  absl::Status look_at_peers(bool slept) const;
  absl::Status failure_of(int rank) const;
  absl::Status timeout_error() const;
  std::vector<int> missing() const;
  std::string last_seen(int rank) const;
  RankBlock& self() const { return space_.rank_block(group_.rank); }

  const Group& group_;
  SharedSpace& space_;
  const bool may_spin_;
  std::uint64_t phase_ = 0;
  CallSignature call_;
  std::chrono::steady_clock::time_point deadline_;
  mutable std::mutex mutex_;
  absl::Status failure_;  // guarded by mutex_
};

}  // namespace tessera
