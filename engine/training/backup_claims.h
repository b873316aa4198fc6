#pragma once

#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/comm/call_watch.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/key_value_store.h"
#include "sharding/layout/plan/microbatch_deal.h"
#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// Chooses the microbatch that this rank computes next, if ranks also compute microbatches of slower ranks
/// ("deal.backups"). Ranks communicate by counters. If all ranks share memory, the counters are in it, and a claim
/// sends nothing. Otherwise they are in the job's store, and a claim costs a request and an answer.
///
/// A rank computes the microbatches of its own run from the first to the last. It then claims microbatches of the
/// slowest rank; each claim takes the last unclaimed microbatch of that rank's run. The rank that first completes a
/// claimed microbatch has made it, and the other result is not used. Both results belong to the same leaf of the step's
/// tree. If another rank has already completed the microbatch that a slow rank would compute next, the slow rank leaves
/// the rest of its run to the ranks that have claimed it. So the microbatches that are computed twice are at the ends
/// of runs.
///
/// A rank has one counter for both ends of its run: the number of microbatches that it has completed, and the number
/// that were claimed. One addition changes one of these numbers and returns both, so a rank that completes a microbatch
/// knows whether another rank computes it too. Each microbatch also has a counter of its completions. Only the rank to
/// whose run the microbatch belongs and the rank that claimed it add to this counter. Steps alternate between two sets
/// of counters. Ranks meet between steps. When the next step begins, each rank therefore sets its counter of the last
/// step to 0, and also the counters of the microbatches that it completed after a claim.
///
/// Training owns a BackupClaims and calls it from the thread that trains.
class BackupClaims {
 public:
  /// The job's store, and how long an answer of it may take: `limit` (comm.timeout_s), or less if `watch` finds that
  /// the host which serves the store has vanished. `store` and `watch` outlive the BackupClaims.
  struct Store {
    KeyValueStore& store;
    CallWatch& watch;
    std::chrono::milliseconds limit;
  };
  /// `group` has all ranks. The constructor is collective.
  BackupClaims(std::shared_ptr<Collectives> group, const MicrobatchOrder& order, const Store& store);

  /// Counters that all ranks add to.
  class Counters {
   public:
    virtual ~Counters() = default;
    /// Adds to a counter, which begins with 0, and returns its new value. Throws tessera::Error (75) if the process
    /// that has the counters has ended, or does not answer within the limit.
    virtual std::int64_t add(std::int64_t counter, std::int64_t amount) = 0;
    /// Sets a counter to 0. REQUIRES: no other rank uses the counter during this call.
    virtual void reset(std::int64_t counter) = 0;
  };

  /// Begins a step with the runs of `order`. All ranks call it with the same order.
  void begin_step(const MicrobatchOrder& order);
  /// Returns the microbatch that this rank computes next; nothing if this rank has no more to compute.
  const std::optional<std::int64_t>& next() const { return next_; }
  /// If the next microbatch belongs to another rank, returns how many other microbatches of other ranks this rank has
  /// completed first in this step.
  const std::optional<int>& turn() const { return turn_; }
  /// Returns the round of the next microbatch (MicrobatchOrder::round_of). REQUIRES: there is a next microbatch.
  std::int64_t round() const;
  /// Returns whether another rank has completed the next microbatch. REQUIRES: there is a next microbatch.
  bool is_overtaken() const { return is_made(*next_); }
  /// Notes that this rank has completed the next microbatch, and chooses the one after it. Returns whether the result
  /// is used.
  bool end();
  /// Passes over the next microbatch, which another rank has completed, and chooses the one after it.
  void pass_over();

  /// Returns the step's order, with the microbatches that other ranks made. All ranks call it when they have no
  /// microbatch left to compute; it is collective. Throws tessera::Error if a rank fails.
  const MicrobatchOrder& agree();
  /// Returns the step's order, as of the last `begin_step` or `agree`.
  const MicrobatchOrder& order() const { return order_; }
  /// Returns the number of the step's microbatches that other ranks made, after ranks have agreed.
  std::int64_t made_again() const { return std::ssize(order_.made_again); }
  /// Returns, for each rank, the number of microbatches on which it has spent time in the step, as of the last `agree`.
  std::span<const std::int64_t> computed() const { return all_computed_; }
  /// Returns the seconds spent so far in `agree`, most of them on waiting for other ranks.
  double communication_seconds() const { return seconds_; }

 private:
  std::int64_t counter_of_rank(int rank) const { return step_ % 2 * (order_.ranks + order_.all()) + rank; }
  std::int64_t counter_of_ends(std::int64_t microbatch) const { return counter_of_rank(order_.ranks) + microbatch; }
  TreeBlock own_run() const { return order_.run_of(group_->rank()); }
  RunProgress add(int rank, std::int64_t amount) const;
  bool is_made(std::int64_t microbatch) const;
  bool make(std::int64_t microbatch);
  void choose(bool run_goes_on);
  std::optional<std::int64_t> claim();

  const std::shared_ptr<Collectives> group_;
  const std::unique_ptr<Counters> counters_;
  MicrobatchOrder order_;
  std::int64_t step_ = 0;  ///< the number of calls of begin_step
  std::optional<std::int64_t> next_;
  std::optional<int> turn_;
  std::int64_t claims_ = 0, computed_ = 0;
  std::int64_t claimed_ = 0;              ///< number of claimed microbatches of this rank's run when this rank last
                                          ///< completed a microbatch
  std::vector<std::int64_t> shared_;      ///< microbatches for which this rank has counted a completion in this step
  std::vector<std::int64_t> made_again_;  ///< microbatches of other ranks that this rank has completed first, in the
                                          ///< order of their computation
  std::vector<std::int64_t> message_, messages_, all_computed_;
  double seconds_ = 0;
};

}  // namespace tessera
