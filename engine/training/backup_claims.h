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
#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// Says which microbatch of a step this rank makes next, where ranks make those of slower ranks again ("deal.backups").
/// Ranks tell each other by counters: in memory that all of them share, where a claim sends nothing, or else in the
/// job's store, where a claim costs a question and an answer.
///
/// A rank makes the microbatches of its own run from the first one on. It then claims microbatches of the slowest rank:
/// each time the last one of that rank's run that nobody has claimed. The rank that first ends a claimed microbatch has
/// made it, and the other result does not count. Both results are the same leaf of the step's tree. A rank whose next
/// microbatch was made by another one leaves the rest of its run to those that have claimed it. So what ranks make
/// again are the ends of runs.
///
/// A rank has one counter for both ends of its run: how many microbatches it has ended, and how many were claimed. One
/// addition changes one of these numbers and shows the other, so a rank that ends a microbatch knows whether another
/// one makes it too. Each microbatch also has a counter of how often it was ended, which those two ranks alone use.
/// Steps use two sets of counters by turns.
/// Ranks meet between steps, so each rank sets its own counters of the last step to 0 during the next step.
///
/// Training owns one and calls it from the thread that trains.
class BackupClaims {
 public:
  /// The job's store, and how long an answer of it may take: `limit` (comm.timeout_s), or less if `watch` finds that
  /// the host which serves the store has vanished. Store and watch outlive the object that asks.
  struct Store {
    KeyValueStore& store;
    CallWatch& watch;
    std::chrono::milliseconds limit;
  };
  /// `group` has all ranks. It is collective.
  BackupClaims(std::shared_ptr<Collectives> group, const MicrobatchOrder& order, const Store& store);

  /// Counters that all ranks add to.
  class Counters {
   public:
    virtual ~Counters() = default;
    /// Adds to a counter, which begins with 0, and returns its new value. Throws tessera::Error (75) where the process
    /// that has the counters is gone, or does not answer within the limit.
    virtual std::int64_t add(std::int64_t counter, std::int64_t amount) = 0;
    /// Sets a counter to 0. REQUIRES: no other rank uses it meanwhile.
    virtual void reset(std::int64_t counter) = 0;
  };

  /// Begins a step with the runs of `order`. All ranks call it alike.
  void begin_step(const MicrobatchOrder& order);
  /// Returns the microbatch that this rank makes next. It is empty when this rank has nothing left to make.
  const std::optional<std::int64_t>& next() const { return next_; }
  /// Returns how many microbatches this rank has made again before the next one, if the next one belongs to another
  /// rank.
  const std::optional<int>& turn() const { return turn_; }
  /// Returns the round of the next microbatch (MicrobatchOrder::round_of). REQUIRES: there is one.
  std::int64_t round() const;
  /// Returns whether another rank has made the next microbatch. REQUIRES: there is one.
  bool is_overtaken() const { return is_made(*next_); }
  /// Ends the next microbatch, and chooses the one after it. Returns whether its result counts.
  bool end();
  /// Passes over the next microbatch, which another rank has made, and chooses the one after it.
  void pass_over();

  /// Returns the step's order, with the microbatches that were made again. All ranks call it when they have nothing
  /// left to make; it is collective. Throws tessera::Error where a rank fails.
  const MicrobatchOrder& agree();
  /// Returns how many microbatches of the step were made again, once ranks have agreed.
  std::int64_t made_again() const { return std::ssize(order_.made_again); }
  /// Returns the microbatches on which each rank has spent time in the step [rank], since the last `agree`.
  std::span<const std::int64_t> computed() const { return all_computed_; }
  /// Returns the seconds spent so far in `agree`, most of them on waiting for other ranks.
  double communication_seconds() const { return seconds_; }

 private:
  /// How far a run has come: microbatches ended from its beginning, and claimed from its end.
  struct Progress {
    std::int64_t ended = 0, claimed = 0;
  };

  std::int64_t counter_of_rank(int rank) const { return step_ % 2 * (order_.ranks + order_.all()) + rank; }
  std::int64_t counter_of_ends(std::int64_t microbatch) const { return counter_of_rank(order_.ranks) + microbatch; }
  TreeBlock own_run() const { return order_.run_of(group_->rank()); }
  Progress add(int rank, std::int64_t amount) const;
  bool is_made(std::int64_t microbatch) const;
  bool make(std::int64_t microbatch);
  void choose(bool run_goes_on);
  std::optional<std::int64_t> claim();
  std::optional<int> slowest() const;

  const std::shared_ptr<Collectives> group_;
  const std::unique_ptr<Counters> counters_;
  MicrobatchOrder order_;
  std::int64_t step_ = 0;  ///< the number of calls of begin_step
  std::optional<std::int64_t> next_;
  std::optional<int> turn_;
  std::int64_t claims_ = 0, computed_ = 0;
  std::int64_t claimed_ = 0;              ///< microbatches of this rank's run that were claimed when it last ended one
  std::vector<std::int64_t> shared_;      ///< microbatches whose ends this rank has counted in this step
  std::vector<std::int64_t> made_again_;  ///< microbatches that this rank has made again, by turn
  std::vector<std::int64_t> message_, messages_, all_computed_;
  double seconds_ = 0;
};

}  // namespace tessera
