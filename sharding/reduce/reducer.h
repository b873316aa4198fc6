#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/base/metrics/latency_histogram.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/carrier.h"
#include "sharding/compress/kept_gradients.h"
#include "sharding/compute_device.h"
#include "sharding/gather/call_clock.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/reduce/gradient_wire.h"
#include "sharding/reduce/microbatch_tree.h"
#include "sharding/reduce/notes_exchange.h"
#include "sharding/reduce/own_squares.h"
#include "sharding/reduce/pack/gradient_squares.h"
#include "sharding/reduce/pack/pending_copies.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/reduce/reduced_unit.h"
#include "sharding/reduce/reductions.h"
#include "sharding/reduce/unit_buckets.h"
#include "sharding/round_log.h"
#include "sharding/unit.h"
#include "sharding/unit_agreement.h"

namespace tessera {

/// Takes each gradient when backward has computed it, packs it into its unit's bucket, and reduces a unit when its
/// gradients are complete.
///
/// Units are reduced in the same order on all ranks, in whatever order gradients arrive. In the first microbatch it is
/// the reverse order of their definition; later it is the order in which rank 0 completed them in the first microbatch.
/// If gradients accumulate in place, it stays the reverse order. A unit that a rank did not use takes part with zeros,
/// at the latest when backward ends. Ranks may therefore take different branches.
///
/// Reducer does not wait for gradients of parameters that no rank used in the last step (`expect`). If Reducer waited
/// for these gradients, their units would hold buckets that other units need. When the set of used parameters changes,
/// the step of the change may need buckets beyond the plan, and the ranks agree on the order again.
///
/// A gradient goes from `.grad` (parameter dtype) to a bucket (reduce dtype; one copy), to the sum over ranks (fp32),
/// and to `FlatGroup::gradient`. Sums are plain: the factor 1/N, the loss scale and clipping are applied in the
/// optimizer's pass. While the sum over ranks is in cache, it is added to the sums of earlier microbatches and passed
/// to a GradientVisitor.
///
/// Reducer decides when a unit is reduced. Its parts do the other work. UnitBuckets gives memory, and GradientWire
/// decides the form of messages. Reductions makes sums over ranks, and MicrobatchTree makes sums over microbatches.
/// NotesExchange sends notes together with a sum. If the plan has enough buckets, a complete unit only starts its
/// reduction, which then runs while backward computes (Reductions).
///
/// A parameter can get several gradients in one backward, when activation recomputation runs parts of the graph
/// separately. These gradients are added up as long as the unit's bucket is open. A gradient that arrives after that is
/// reduced by itself and added to the sum.
///
/// If sums are offloaded, a unit's sum has memory from the start to the end of its reduction.
///
/// If units are updated in backward (PlannedUpdate::in_backward), a unit with a complete sum is passed to the code that
/// updates it. The next unit then gets the sum's place. A unit is closed (Unit::close) when its reduction starts, since
/// this rank has then read it for the last time. When the sum is complete, all ranks have therefore read the unit.
/// Notes that are sent with the reduction tell which parameters a rank used, and in which order the rank gathered units
/// in forward. A gradient that arrives after the start of the reduction is an error.
///
/// Under "reproducible", a microbatch's gradients are a leaf of the step's tree (MicrobatchTree). If a rank keeps
/// gradients until a backward has ended, they are added to the tree at that time (`end_microbatch`). Sums over ranks
/// are added when they are complete. A gradient that arrives after its unit was reduced would be missing in its leaf,
/// and is an error.
///
/// The thread that runs backward makes all calls. Errors of transports are thrown as tessera::Error.
class Reducer final : private ReductionEnds {
 public:
  /// Gets a unit whose gradients are summed or, if work is queued, will be summed. The gradients stay in place until
  /// this function returns.
  using OnSummed = std::function<void(Unit& unit, const UnitAgreement& agreed)>;

  /// Gets a unit whose sum of this round is complete (FlatGroup::gradient of its groups) or, if work is queued, is
  /// queued. It is called once more if a gradient arrives after that.
  using OnReduced = std::function<void(const Unit& unit)>;

  /// Memory of the plan, on `device`. Other ranks read the buckets and, if units are updated in backward, the sums.
  struct Memory {
    Arena buckets, scratch, sums;
    Arena feedback = {};  ///< memory of MemoryCategory::kFeedback, zeros at first
    /// Brings the sums, numbered by unit, if MemoryPlan::gradients_below; else null.
    Carrier* sums_below = nullptr;
  };

  /// `visitor` gets every reduced gradient. (If there is one rank, and sums are not offloaded, there are no
  /// reductions.) It is null if work is queued, since values that are not computed yet cannot be read.
  Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Memory memory, ComputeDevice device,
          GradientVisitor* visitor);

  /// Sets the function that updates units in backward.
  void on_summed(OnSummed update) { on_summed_ = std::move(update); }

  /// Sets the function that is called for each unit's sum.
  void on_reduced(OnReduced told) { on_reduced_ = std::move(told); }
  /// Sets the function that is called each time that a gradient arrives.
  void on_gradient(std::function<void()> told) { on_gradient_ = std::move(told); }

  /// From now on, announces every reduction that begins to `rounds`. `rounds` must outlive this object.
  void tell(RoundLog& rounds) { rounds_ = &rounds; }

  /// From now on, records in `latencies` how long each unit's reduction takes from its beginning to its end, including
  /// the lags of the plan. If there is one rank, and sums are not offloaded, there are no reductions. `latencies`
  /// [unit] must outlive this object. `queue` is a GPU's clock for reductions, and is null on the CPU.
  void time_reductions(std::span<LatencyHistogram> latencies, QueueTimes* queue = nullptr) {
    reductions_.time(latencies, queue);
  }

  /// Allocates memory for measuring this rank's own gradients ("noise_scale") on the CPU: a number for each parameter.
  void keep_own_squares() { own_.keep(); }
  /// Sets `squares`, which adds up the squares of values in buckets on a GPU, to measure this rank's own gradients
  /// there. `squares` must outlive its last use, and may be replaced between steps.
  void square_by(GradientSquares& squares) { own_.square_by(squares); }
  /// Sets whether gradients are squared: on the CPU while they are copied into buckets, on a GPU in buckets. It is
  /// called when a backward begins, in the same way in all backwards of a step. REQUIRES: `keep_own_squares` or
  /// `square_by` was called.
  void square_own(bool on) { own_.square(on); }
  /// Returns whether this rank contributes the gradients of each microbatch, so that each can be measured; otherwise it
  /// contributes their sum.
  bool contributes_microbatches() const { return !setup_.accumulates(); }
  /// If `contributes_microbatches`, returns the squared norm of this rank's contributions since the last call; NaN if
  /// it is not known because a unit was reduced more than once. Otherwise it returns the squared norm of the sum so
  /// far. On a GPU the norm is added to the step's norm on the device (GradientSquares::take), and the result is 0.
  double take_own_square() { return own_.take(order_.units); }

  /// A rank without a batch calls this function when the other ranks begin the reduction of a unit, in the agreed
  /// order. The rank takes part with zeros.
  void reduce_nothing();

  /// Makes a hook of the program make the sums of all gradients, over any transport.
  void sum_by(const std::shared_ptr<CommHook>& hook) { wire_.sum_by(hook); }

  /// It is called when a backward begins in which units are updated. `digest` is a hash of the actions so far that must
  /// be the same on all ranks. `weight` and `samples` are the numbers of this rank's microbatch (UnitAgreement).
  void begin_round(std::uint64_t digest, double weight, std::int64_t samples) {
    notes_.begin_round(digest, weight, samples);
  }

  /// A parameter's hook calls this when its gradient is in `.grad`; the gradient is taken and reset. If `counts` is
  /// false, zeros are taken instead of the gradient, and the parameter does not become used.
  void take(FlatGroup& group, std::size_t parameter, bool counts = true);

  /// Adds the kept gradients to the tree as a leaf, unless `counts` is false. Under "reproducible" it is called before
  /// `finish` of a microbatch's last backward.
  void end_microbatch(bool counts = true);

  /// It is called before a microbatch of another rank ("deal.backups"). `turn` is the number of such microbatches that
  /// this rank has computed before it in the step. If `turn` has no value, the next microbatch belongs to this rank's
  /// run, as at the beginning of a step.
  void begin_backup(std::optional<int> turn) { tree_.begin_backup(turn); }

  /// Gives ranks the runs of microbatches of `order` ("deal" by speed) from the next step on. Call it between steps,
  /// with the same order on all ranks. If ranks have computed other ranks' microbatches, call it also before the last
  /// `finish` of a step.
  void deal(const MicrobatchOrder& order) { tree_.deal(order); }

  /// It is called at the end of a microbatch's backward. If `reduce` is false, gradients stay in their (unsharded)
  /// accumulators. Otherwise every unit's sum is in place afterwards. If `has_batch` is false, this rank computed
  /// nothing. It then takes part, with zeros, in the reductions of late gradients: those that reached other ranks after
  /// their units' reductions.
  void finish(bool reduce, bool has_batch = true);

  /// It is called after the optimizer has used the gradients. The next gradient begins a new sum.
  void reset();

  /// Forgets error feedback (CompressionConfig::error_feedback, GradientMethod), so that it is not added to later
  /// gradients.
  void forget_feedback() { wire_.forget(); }
  /// It is called when the step's gradients are dropped. Error feedback gets its earlier values back if there is a copy
  /// (restore_skipped); otherwise it begins anew.
  void restore_feedback() { wire_.restore(); }
  /// Returns the memory that holds error feedback, for every group. Between steps it may be read and written.
  KeptGradients kept() const { return wire_.kept(); }

  /// Turns GradientMethods (compressors), where there are any, on or off from the next reduction on. `step` is the
  /// number of the step under way, counted from 1.
  void use_methods(bool on, std::int64_t step) { wire_.use_methods(on, step); }

  /// Sets the parameters that are expected to get gradients. `used` [trainable parameter, in unit, group, layout order]
  /// tells whether any rank used the parameter in the last step. It is the same on all ranks. Call it between steps.
  void expect(const std::vector<char>& used);

  /// Returns whether this parameter got a gradient on this rank since `reset`.
  bool used(const FlatGroup& group, std::size_t parameter) const;

  /// Returns the indices of the units that have gradients, in the order in which they are reduced.
  std::span<const int> order() const { return order_.units; }
  const ReducerCounts& counts() const { return counts_; }

 private:
  /// The order in which units are reduced, the same on all ranks, and the position of this round in that order.
  struct Order {
    std::vector<int> units;      ///< unit indices
    std::vector<int> completed;  ///< units completed this round, in this rank's order
    std::size_t next = 0;        ///< index into `units`
    bool agreed = false;
  };

  ReducedUnit& entry(int unit) { return units_[static_cast<std::size_t>(unit)]; }
  std::vector<ReducedUnit> reduced_units(const std::vector<Unit*>& units);
  void summed(ReducedUnit& unit) override;
  void agreed(ReducedUnit& unit, const UnitAgreement& agreement) override;
  void expect_not_updated(const ReducedUnit& unit, const FlatGroup& group, std::size_t parameter) const;
  void expect_in_leaf(const ReducedUnit& unit, const FlatGroup& group, std::size_t parameter) const;
  void open(ReducedUnit& unit);
  void launch_ready();
  void reduce_late(bool has_batch);
  std::vector<char> late_anywhere() const;
  void reduce(ReducedUnit& unit);
  void start(ReducedUnit& unit);
  Lease take_sum(const ReducedUnit& unit);
  void agree_on_order();

  Memory memory_;
  const ReduceSetup setup_;
  PendingCopies copies_;  ///< copies of gradients of all units that wait
  ReducerCounts counts_;
  MicrobatchTree tree_;
  GradientWire wire_;
  UnitBuckets buckets_;
  std::vector<ReducedUnit> units_;  ///< [unit]
  OwnSquares own_;
  NotesExchange notes_;
  OnSummed on_summed_;
  OnReduced on_reduced_;
  std::function<void()> on_gradient_;
  Order order_;
  std::vector<char> was_late_;  ///< [unit]: whether the unit had a late gradient in the last round with a batch
  RoundLog* rounds_ = nullptr;
  std::vector<char> expected_;  ///< the argument of the last `expect`
  bool expects_all_ = true;     ///< whether a gradient of every trainable parameter is expected
  Reductions reductions_;       ///< declared last, since its reductions use the other members
};

}  // namespace tessera
