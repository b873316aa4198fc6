#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// Says which microbatch of a step this rank makes next, where ranks make those of slower ranks again ("deal.backups").
/// There is a word for each microbatch of a step in memory that all ranks share, so a claim costs an atomic exchange
/// and sends nothing.
///
/// A rank makes its own run from the front. When that has ended, it claims microbatches of the slowest rank from the
/// back, each unless another rank has claimed it. Whoever ends a microbatch first has made it, and the other result
/// does not count; both are the same leaf of the step's tree. A rank whose next microbatch was made by another one
/// leaves the rest of its run to those that have claimed it. So what ranks make again are the ends of runs.
///
/// Training owns one and calls it from the thread that trains. Between steps ranks have met, so nobody looks at the
/// words of an earlier step any more.
class BackupClaims {
 public:
  /// `group` has all ranks, which share memory. It is collective.
  BackupClaims(std::shared_ptr<Collectives> group, const MicrobatchOrder& order);

  /// Begins a step with the runs of `order`. All ranks call it alike.
  void begin_step(const MicrobatchOrder& order);
  /// Returns the microbatch that this rank makes next. It is empty when this rank has nothing left to make.
  const std::optional<std::int64_t>& next() const { return next_; }
  /// Returns how many microbatches this rank has made again before the next one, if that is another rank's.
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
  using Word = std::atomic<std::uint64_t>;
  static_assert(Word::is_always_lock_free);

  Word& word(std::int64_t microbatch) const { return reinterpret_cast<Word*>(memory_.data())[microbatch]; }
  bool is_open(std::int64_t microbatch) const;
  bool is_made(std::int64_t microbatch) const;
  bool make(std::int64_t microbatch);
  void choose(bool run_goes_on);
  std::optional<std::int64_t> claim();
  std::optional<std::int64_t> of_slowest() const;

  const std::shared_ptr<Collectives> group_;
  MicrobatchOrder order_;
  Arena memory_;
  std::uint64_t step_ = 0;  ///< the number of calls of begin_step; a word of an earlier step counts as open
  std::optional<std::int64_t> next_;
  std::optional<int> turn_;
  std::int64_t claims_ = 0, computed_ = 0;
  std::vector<std::int64_t> made_again_;  ///< by this rank, by turn
  std::vector<std::int64_t> message_, messages_, all_computed_;
  double seconds_ = 0;
};

}  // namespace tessera
