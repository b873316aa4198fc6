#pragma once

// See docs/glossary.md: dealt.

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/asynchronous/owned_shards.h"
#include "engine/asynchronous/peer_board.h"
#include "engine/step/agree/step_agreement.h"
#include "optim/grad_norm.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// Steps that use only the gradients that are ready first: those of all ranks except the SyncConfig::backups slowest
/// ranks (arXiv 1604.00981). Parameter values and optimizer states lie in OwnedShards. A rank computes with the values
/// that it pulled last. Gradients lie in memory that all ranks map (MeshAxes::readers), so nothing is sent. The ranks
/// that take part in a step read each other's gradients at the places where backward wrote them.
///
/// | call     | what it does                                                                                     |
/// |----------|--------------------------------------------------------------------------------------------------|
/// | `offer`  | this rank takes part if too few offered before it, and waits until enough ranks take part        |
/// | `sum`    | the shards are dealt to these ranks; each sums its shards' gradients, and the sums' squares      |
/// | `update` | each of these ranks applies the rule to its shards                                               |
/// | `end`    | waits until all of these ranks have updated their shards, and opens the next step                |
/// | `miss`   | replaces the last three calls if this rank comes too late                                        |
///
/// Invariants:
///  1. Shards change only after all ranks that take part have offered, and before the step ends. All gradients of a
///     step were therefore computed with one version of the values: a rank that takes part began to compute after the
///     previous step had ended.
///  2. Sums are made in the pairwise tree over the ranks that take part, in rank order. A step in which all ranks take
///     part has the same bits as an ordinary step, in which all ranks wait for each other.
///  3. Between its `offer` and its `end`, a rank that takes part gets the Counts after the previous step from `done`.
///
/// The thread that trains calls all functions. They throw tessera::Error: 75 if a rank for which this rank waits ends,
/// or does not come within comm.timeout_s; 64 if ranks were given different learning rates or options.
class FirstGradients final : public CommonParameters {
 public:
  /// Makes the shards. The gradients in `copies` are in memory that all ranks of `board` map. The gradients of the
  /// ranks lie there one after another. Keeps references to the arguments. It is collective.
  FirstGradients(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board,
                 HostCopies& copies);

  std::int64_t memory_bytes() const override { return shards_.memory_bytes(); }
  void adopt() override;
  void bring_together() override;
  std::span<std::int64_t> counts(const FlatGroup& group) override { return shards_.counts(group); }
  double communication_seconds() const override { return shards_.communication_seconds() + wait_seconds_; }
  PulledParameters* pulled() override { return &shards_; }

  /// Returns how many ranks take part in a step.
  std::int64_t ranks_of_a_step() const { return needed_; }
  /// Offers this rank's gradients to the step that follows the latest step that this rank knows. `step`: the number of
  /// this step in error messages. `used`: [trainable parameter] whether the parameter has a gradient of this rank.
  /// Returns false if the gradients come too late. If not, returns true once enough ranks take part.
  bool offer(std::int64_t step, const LocalStep& own, std::span<const char> used);
  /// Adds up the data of the step's ranks. The result is the same on all of these ranks, and valid until the next call.
  const AgreedStep& sum(const LocalStep& own);
  /// Returns whether this rank writes log messages for all ranks of the step. The first of these ranks writes them.
  /// Call it after `offer`.
  bool speaks() const { return members_.front() == board_.rank(); }
  void update(const ShardRule& rule, const PushRates& with);
  /// The number of steps that updated parameters, and the number of samples in these steps.
  struct Counts {
    std::int64_t steps = 0, samples = 0;
  };
  /// Waits until all ranks of the step have updated their shards, and opens the next step. `counts` includes this step.
  void end(const Counts& counts);
  /// Drops this rank's gradients, and waits until the step for which they came too late is over. Returns the number of
  /// steps that others have made since this rank's last step, including the missed step.
  std::int64_t miss();

  /// Returns the number of times that ranks have dropped their gradients so far, summed over all ranks.
  std::int64_t dropped() const;
  /// Returns the counts after the latest step that this rank knows. After `miss`, the counts may include a step that is
  /// about to end.
  const Counts& done() const { return done_; }
  void set_done(const Counts& counts);
  /// Returns the number of steps that this rank has skipped in `bring_together` since the last call.
  std::int64_t take_skipped() { return std::exchange(skipped_, 0); }

 private:
  struct Control;  // a struct in memory that ranks share, as Entry is
  struct Entry;    // the data of one rank about its step, for the other ranks
  /// An owner's part of a group.
  struct Part {
    FlatGroup* group = nullptr;
    Extent extent;
    NormSums sums;
  };

  Control& control() const { return *reinterpret_cast<Control*>(memory_.data()); }
  Entry& entry(int rank) const;
  std::span<char> used_of(int rank) const;
  double* sums_of(int owner) const { return sums_ + static_cast<std::size_t>(owner) * totals_.most_sums(); }
  std::int64_t step_under_way() const { return known_ + 1; }
  std::int64_t completed() const;
  bool try_to_join();
  /// Returns whether a rank takes part in the step under way, or in a later step that this rank does not know yet.
  bool has_joined(int rank) const;
  bool is_member(int rank) const;
  bool is_full() const;
  void read_done();
  /// Sums the owner's parts. Returns whether the sums are finite.
  bool sum_parts(int owner);
  void read(int rank);
  void check_numbers(const LocalStep& own);
  void open_next();
  /// Calls `body(owner)` for the owners whose shards are dealt to this rank in the step under way.
  template <class Body>
  void for_own_owners(const Body& body) const;
  template <class Arrived>
  void wait_for(const Arrived& arrived, std::int64_t spare = 0);

  OwnedShards shards_;
  const HostCopies& copies_;
  const std::int64_t backups_, needed_;
  const std::int64_t gradient_bytes_;  ///< distance in bytes from a rank's gradients to those of the next rank
  NormTotals totals_;
  std::vector<std::vector<Part>> parts_;  ///< [owner]: the owner's parts, in the order of groups
  std::size_t parameters_ = 0;            ///< number of trainable parameters
  Arena memory_;                          ///< Control, Entries, flags, sums of squares
  double* sums_ = nullptr;                ///< [owner][NormTotals::most_sums]: sums of squares of the owner's parts
  std::int64_t known_ = 0;                ///< the latest step that this rank knows; the rank takes part in the step
                                          ///< after it
  std::int64_t skipped_ = 0;
  std::int64_t told_step_ = 0;            ///< number of the step under way, for error messages
  Counts done_;                           ///< the result of `done`
  std::vector<int> members_;              ///< ranks of the step under way, in order
  std::vector<const void*> sources_;      ///< scratch of sum_parts
  std::vector<const double*> read_sums_;  ///< [owner]: the memory that sums_of returns
  AgreedStep agreed_;
  double wait_seconds_ = 0;
};

}  // namespace tessera
