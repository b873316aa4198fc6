#pragma once

// See docs/glossary.md: lease, unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/base/metrics/latency_histogram.h"
#include "sharding/arena.h"
#include "sharding/carrier.h"
#include "sharding/gather/call_clock.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/reduce/gradient_wire.h"
#include "sharding/reduce/microbatch_tree.h"
#include "sharding/reduce/notes_exchange.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/reduce/reduced_unit.h"
#include "sharding/reduce/unit_buckets.h"
#include "sharding/unit_agreement.h"

namespace tessera {

/// Functions that are called when reductions end; Reducer implements them. The sum of the unit's gradients of this
/// round is then in FlatGroup::gradient or, if work is queued, is queued.
class ReductionEnds {
 public:
  virtual void summed(ReducedUnit& unit) = 0;
  /// It is called after `summed` if units are updated in backward, with the notes that came with the sum.
  virtual void agreed(ReducedUnit& unit, const UnitAgreement& agreement) = 0;

 protected:
  ~ReductionEnds() = default;
};

/// Makes sums over ranks from a unit's buckets. A reduction is started; some units later this rank does its share, and
/// some units after that this rank waits for the end (SumPlan::reduction_lag and end_lag). All ranks do this at the
/// same points.
///
/// Reducer owns a Reductions object, and the thread that runs backward calls it: `begin`, then `add` for each trainable
/// group, then `post`, then `follow`. Errors of transports are thrown as tessera::Error.
class Reductions {
 public:
  /// Reducer's other parts, and its counts. They must outlive this object.
  struct Parts {
    GradientWire& wire;
    MicrobatchTree& tree;
    UnitBuckets& buckets;
    const NotesExchange& notes;
    ReducerCounts& counts;
  };
  /// `visitor` is the visitor that Reducer got. `ends` must outlive this object.
  Reductions(const ReduceSetup& setup, const Parts& parts, GradientVisitor* visitor, ReductionEnds& ends);
  /// Drops the sums of reductions that have not ended, which are not needed after a failure.
  ~Reductions();

  /// Takes the memory of reductions under way: `scratch`, and the notes' part of `sums`. `most_groups` is the largest
  /// number of groups of a unit. It is called once, before all other calls.
  void take_memory(std::size_t most_groups, Arena& scratch, Arena& sums);
  /// From now on, records in `latencies` how long reductions take (Reducer::time_reductions).
  void time(std::span<LatencyHistogram> latencies, QueueTimes* queue);

  /// Begins the reduction of a unit. `sum` is the lease of the unit's sum, if sums are offloaded.
  void begin(ReducedUnit& unit, Lease sum);
  /// Starts the sum of a group of the unit that was given to `begin`. REQUIRES: the unit's bucket is filled.
  void add(FlatGroup& group);
  /// It is called when all groups are added. From now on the reduction holds the unit's bucket, unless gradients
  /// accumulate there; the unit's notes are sent if units are updated in backward.
  void post();
  /// Lets earlier reductions continue and end, with the lags of the plan.
  void follow() { follow(setup_.plan.sums().reduction_lag, setup_.plan.sums().end_lag); }
  /// Waits until all reductions under way have ended.
  void end();

 private:
  class Accumulation;
  struct GroupReduction;
  struct UnitReduction;

  UnitReduction& reduction(std::int64_t number) {
    return *reductions_[static_cast<std::size_t>(number) % reductions_.size()];
  }
  UnitReduction& newest() { return reduction(started_ - 1); }
  Accumulation accumulation_of(const ReducedUnit& unit, const FlatGroup& group) const;
  void follow(std::int64_t lag, std::int64_t end_lag);
  void advance(GroupReduction& reduction);
  bool replicas_follow() const;
  void complete(UnitReduction& reduction);
  void complete(GroupReduction& reduction);
  Work sum_over_replicas(GroupReduction& reduction);
  float* scratch(UnitReduction& reduction, std::int64_t numel);
  Waits waits() const { return setup_.plan.sums().end_lag == 0 ? Waits::kAtOnce : Waits::kLater; }

  const ReduceSetup setup_;
  const Parts parts_;
  GradientVisitor* const visitor_;
  ReductionEnds& ends_;
  std::span<LatencyHistogram> latencies_;  ///< empty if reductions are not timed
  CallClock clock_;
  /// Reductions are numbered from 0; reduction k is in entry k % size until it has ended.
  std::vector<std::unique_ptr<UnitReduction>> reductions_;
  std::int64_t started_ = 0, advanced_ = 0, over_ = 0;  ///< numbers of reductions that have started, advanced and ended
};

}  // namespace tessera
