#pragma once

// See docs/glossary.md: slot, unit.

#include <ATen/core/Tensor.h>

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
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/kept_gradients.h"
#include "sharding/compute_device.h"
#include "sharding/gather/call_clock.h"
#include "sharding/gather/unit_slots.h"
#include "sharding/layout/plan/sum_counter.h"
#include "sharding/reduce/block_sums.h"
#include "sharding/reduce/gradient_packer.h"
#include "sharding/reduce/gradient_squares.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/round_log.h"
#include "sharding/unit.h"
#include "sharding/unit_agreement.h"

namespace tessera {

/// Counts of what a Reducer has done so far.
struct ReducerCounts {
  std::int64_t reductions = 0;        ///< units reduced over the shard axis
  std::int64_t reduced_bytes = 0;     ///< bytes of gradients sent into reductions
  double reduction_seconds = 0;       ///< spent in reductions, including waits for other ranks
  std::int64_t overflow_buckets = 0;  ///< buckets beyond the plan, for gradients that came in another order
  std::int64_t overflow_bytes = 0;    ///< bytes of buckets and scratch beyond the plan, held now
  std::int64_t overflow_peak = 0;     ///< largest number since `reset`
};

/// Takes each gradient as backward makes it, packs it into its unit's bucket, and reduces a unit when it is complete.
///
/// Units are reduced in one agreed order on all ranks, whatever order gradients come in: in the first step the reverse
/// of their definition, later the order in which rank 0 completed them in the first step. A unit that a rank did not
/// use takes part with zeros, at the latest when backward ends. So ranks may take different branches.
///
/// Parameters that no rank used in the last step (`expect`) are not waited for, so that their units keep no bucket from
/// the others. When the set of used parameters changes, the step of the change may need buckets beyond the plan, and
/// the ranks agree on the order again.
///
/// The way of a gradient: `.grad` (parameter dtype) -> bucket (reduce dtype; one copy) -> sum over ranks (fp32) ->
/// `FlatGroup::gradient`. Sums are plain: 1/N, loss scale and clip enter in the optimizer's pass. The last sum of the
/// way adds onto earlier microbatches and shows the result to a GradientVisitor, all while it is in cache.
///
/// Where the plan has the buckets for it (MemoryPlan::reduction_lag), a unit that is complete only starts its
/// reduction. This rank does its share of the reduction some units later, and waits for the end some units after that;
/// both happen at places that are the same on all ranks (Collectives::reduce_scatter).
///
/// A parameter can get several gradients in one backward, when activation recomputation runs parts of the graph
/// separately. They are added while the unit's bucket is open. A gradient that comes after that is reduced by itself
/// and added to the sum.
///
/// Where sums are offloaded, a unit's sum has memory from the start of its reduction to its end.
///
/// If units are updated in backward (PlannedUpdate::in_backward), a unit with a complete sum is handed to the code
/// that updates it, and the sum's place goes to the next unit. A unit is closed (Unit::close) when its reduction
/// starts, since this rank has then read it for the last time; so when a sum is there, all ranks have read the unit.
/// The reduction also carries which parameters a rank used, and in which order it gathered units in forward. A gradient
/// that comes after the reduction started is an error.
///
/// Under "reproducible" (PlannedWire) a microbatch's gradients are a leaf of the step's tree, and sums join
/// by a binary counter (SumCounter): sums that a rank keeps until a backward has ended join then (`end_microbatch`),
/// and sums over ranks join as they come. Where a rank's microbatches are no subtree, BlockSums makes the sum of ranks.
/// A gradient that comes after its unit was reduced would be no part of its leaf, and is an error.
///
/// The thread that runs backward makes all calls. Errors of transports are thrown as tessera::Error.
class Reducer {
 public:
  /// Gets a unit whose gradients are summed, or will be where work is queued; they stay in place until this returns.
  using OnSummed = std::function<void(Unit& unit, const UnitAgreement& agreed)>;

  /// Gets a unit whose sum of this round is there (FlatGroup::gradient of its groups), or is queued where work is
  /// queued. It is called once more if a gradient comes after that.
  using OnReduced = std::function<void(const Unit& unit)>;

  /// Memory of the plan, on `device`. Peers share the buckets and, where units are updated in backward, the sums.
  struct Memory {
    Arena buckets, scratch, sums;
    Arena feedback = {};  ///< MemoryCategory::kFeedback; zeros
    /// Brings the sums, numbered by unit, if MemoryPlan::gradients_below; else null.
    Carrier* sums_below = nullptr;
  };

  /// `visitor` sees every reduced gradient; where there is one rank, nothing is reduced. It is null if work is queued,
  /// since values that are not computed yet cannot be read.
  Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Memory memory, ComputeDevice device,
          GradientVisitor* visitor);
  ~Reducer();

  /// Sets who updates units in backward.
  void on_summed(OnSummed update) { on_summed_ = std::move(update); }

  /// Sets the function that hears of sums.
  void on_reduced(OnReduced told) { on_reduced_ = std::move(told); }
  /// `told` is called each time that a gradient has come.
  void on_gradient(std::function<void()> told) { on_gradient_ = std::move(told); }

  /// Tells `rounds`, from now on, of every reduction that begins. `rounds` must outlive this object.
  void tell(RoundLog& rounds) { rounds_ = &rounds; }

  /// From now on, notes in `latencies` how long each unit's reduction takes from its beginning to its end, with the
  /// lags of the plan. If there is one rank, nothing is reduced. `latencies` [unit] must outlive this object.
  /// `queue`: a GPU's clock for reductions; else null.
  void time_reductions(std::span<LatencyHistogram> latencies, QueueTimes* queue = nullptr) {
    latencies_ = latencies;
    clock_.use(queue);
  }

  /// Makes room to measure this rank's own gradients ("noise_scale") on the CPU: a number for each parameter.
  void keep_own_squares();
  /// Does the same on a GPU, where `squares` adds up the squares of values in buckets. It must outlive its last use,
  /// and may be replaced between steps.
  void square_by(GradientSquares& squares) { device_squares_ = &squares; }
  /// Says whether gradients are squared on their way into buckets, or there. It is called when a backward begins, alike
  /// in all backwards of a step. REQUIRES: `keep_own_squares` or `square_by` was called.
  void square_own(bool on);
  /// Returns whether this rank contributes the gradients of each microbatch, so that each can be measured; otherwise it
  /// contributes their sum.
  bool contributes_microbatches() const { return !accumulates(); }
  /// Returns the squared norm of this rank's contributions since the last call if `contributes_microbatches`; NaN if it
  /// is not known, since a unit was reduced more than once. Otherwise it is the squared norm of the sum so far. On a
  /// GPU the norm is added to the step's norm there (GradientSquares::take), and the result is 0.
  double take_own_square();

  /// A rank without a batch calls it where the others begin the reduction of a unit, in the agreed order: it takes part
  /// with zeros.
  void reduce_nothing();

  /// Lets a program's rule make the sums of all gradients, over any transport.
  void sum_by(const std::shared_ptr<CommHook>& hook);

  /// This is called when a backward begins in which units are updated. `digest`: a hash of what ranks must have done
  /// alike so far; `weight` and `samples`: the numbers of this rank's microbatch (UnitAgreement).
  void begin_round(std::uint64_t digest, double weight, std::int64_t samples) {
    digest_ = digest, weight_ = weight, samples_ = samples;
  }

  /// The hook calls this when `parameter`'s gradient is in `.grad`; the gradient is taken and reset. A gradient that
  /// does not count is taken as zeros, and its parameter does not count as used.
  void take(FlatGroup& group, std::size_t parameter, bool counts = true);

  /// Makes kept gradients a leaf that joins the tree, unless the leaf does not `count`. Under "reproducible" it is
  /// called before `finish` of a microbatch's last backward.
  void end_microbatch(bool counts = true);

  /// Says that the microbatch that comes next is another rank's, and the how-manieth of those that this rank has made
  /// again in the step, from 0. Its gradients are a leaf of their own ("deal.backups"). Without a `turn` it is one of
  /// this rank's run, which is so at the beginning of each step.
  void begin_backup(std::optional<int> turn) { backup_ = turn; }

  /// Gives ranks the runs of microbatches of `order` ("deal" by speed) from the next step on. Call it between steps,
  /// alike on all ranks; before the last `finish` of a step, too, where ranks made microbatches again.
  void deal(const MicrobatchOrder& order) {
    if (blocks_) blocks_->deal(order);
  }

  /// Ends a microbatch's backward. Gradients stay in their (unsharded) accumulators if `reduce` is false. Afterwards
  /// every unit's gradient is in place. `has_batch` false: this rank did nothing, and it takes part in the late
  /// reductions that were late in the last backward.
  void finish(bool reduce, bool has_batch = true);

  /// This is called after the optimizer has used the gradients: the next gradient taken starts a new sum.
  void reset();

  /// Forgets what gradients on the wire lacked so far (CompressionConfig::error_feedback, GradientMethod): later
  /// gradients do not get it.
  void forget_feedback();
  /// This is called when the step's gradients are dropped. Error feedback gets its earlier values back if there is a
  /// copy (restore_skipped); otherwise it begins anew.
  void restore_feedback();
  /// Returns the memory that holds error feedback, for every group. Between steps it may be read and written.
  KeptGradients kept();

  /// Turns GradientMethods (compressors), where there are any, on or off from the next reduction on. `step`: the step
  /// under way, counted from 1.
  void use_methods(bool on, std::int64_t step);

  /// Sets which parameters get gradients: `used` says whether any rank used each in the last step [trainable parameter,
  /// in unit, group, layout order]. It is the same on all ranks. Call it between steps.
  void expect(const std::vector<char>& used);

  /// Returns whether this parameter got a gradient on this rank since `reset`.
  bool used(const FlatGroup& group, std::size_t parameter) const;

  /// Returns the indices of the units that have gradients, in the order in which they are reduced.
  std::span<const int> order() const { return order_; }
  const ReducerCounts& counts() const { return counts_; }

 private:
  enum class Phase : std::uint8_t { kIdle, kFilling, kReady };
  /// A group's memory of error feedback, and the compressor that makes its sums; null where there is none.
  struct Feedback {
    float* shard = nullptr;
    float* replicate = nullptr;
    std::unique_ptr<GradientMethod> method = {};
    std::int64_t wire_bytes = 0;  ///< bytes that this rank sends in a reduction by `method`
  };
  /// Memory for a unit's gradients until they are reduced, or for their sum.
  struct Bucket {
    std::byte* memory = nullptr;
    int slot = UnitSlots::kNone;
    Arena overflow;  ///< memory beyond the plan, used if there was no slot
  };
  struct Entry {
    Entry(Unit* unit, GradientPacker gradients) : unit(unit), gradients(std::move(gradients)) {}

    Unit* unit;
    GradientPacker gradients;
    std::int64_t bucket_bytes = 0, sum_bytes = 0;
    Phase phase = Phase::kIdle;
    Bucket bucket;
    Bucket sum;                      ///< used if units are updated in backward
    std::vector<Feedback> feedback;  ///< [group]
    float* waiting = nullptr;        ///< sums that wait in the tree [place, element of the unit]
    bool reduced = false;            ///< whether it was reduced in this round
    bool has_sum = false;            ///< whether `gradient` holds a sum since `reset`, or will hold it
    bool has_own = false;            ///< whether its gradients of this microbatch are in `own_square_`
    std::int64_t taken = 0,
                 /// with one rank: gradients taken in this round, and how many of them `on_reduced` has heard of
        told = 0;
  };
  class Accumulation;
  struct GroupReduction;
  struct UnitReduction;

  Entry& entry(const Unit& unit) { return entries_[unit.index]; }
  /// Returns whether gradients stay in place until `finish`. Otherwise a unit is reduced as soon as it is complete.
  bool accumulates() const;
  bool is_alone_in_place() const;
  bool updates_in_backward() const { return plan_.update().in_backward; }
  void expect_not_updated(const Entry& entry, const FlatGroup& group, std::size_t parameter) const;
  void expect_in_leaf(const Entry& entry, const FlatGroup& group, std::size_t parameter) const;
  SumCounter counter() const { return blocks_ ? blocks_->counter() : SumCounter(plan_.wire().accumulation); }
  bool makes_tree() const { return plan_.wire().reproducible; }
  /// Returns whether this microbatch's gradients go to the place where their sum waits, since no other sum waits there.
  bool is_leaf_in_waiting() const;
  /// Returns that place.
  int place_of_leaf() const { return backup_ ? plan_.first_backup() + *backup_ : counter().turn(round_).place; }
  float* waiting_of(const Entry& entry, const FlatGroup& group, int place) const;
  float* place_of_sum(const FlatGroup& group) const;
  Accumulation accumulation_of(const Entry& entry, const FlatGroup& group) const;
  void open(Entry& entry);
  /// Gives `bucket` one of `slots`, or memory beyond the plan.
  void take_place(Bucket& bucket, UnitSlots& slots, const Unit& unit, std::int64_t bytes);
  void take_overflow(Bucket& bucket, const Unit& unit, std::int64_t bytes);
  void free(Bucket& bucket, UnitSlots& slots);
  void place_sum(Entry& entry);
  Feedback take_feedback(const FlatGroup& group, float* method_work);
  GradientMethod* method_of(const FlatGroup& group) const;
  void copy_feedback();
  ReduceOptions shard_options(const FlatGroup& group) const;
  ReduceOptions replicate_options(const FlatGroup& group) const;
  Waits waits() const;
  void start_notes(UnitReduction& reduction);
  void hand_over(UnitReduction& reduction);
  UnitAgreement agreement_on(UnitReduction& reduction);
  void write_notes(const UnitReduction& reduction);
  /// Returns whether the unit's gradients wait in the place of their sum.
  bool is_in_place(const Entry& entry) const;
  /// Returns where a group's gradients wait: in their sum's place, or behind the unit's earlier groups in its bucket.
  std::byte* bucket_of(const Entry& entry, const FlatGroup& group) const;
  void launch_ready();
  void tell(Entry& entry);
  void reduce_late(bool has_batch);
  std::vector<char> late_anywhere() const;
  void note_overflow(const Arena& arena);
  void reduce(Entry& entry);
  UnitReduction& reduction(std::int64_t number);
  void start(Entry& entry);
  Lease take_sum(const Entry& entry);
  void start_group(UnitReduction& reduction, FlatGroup& group);
  void join_blocks(const Entry& entry, FlatGroup& group);
  void follow(std::int64_t lag, std::int64_t end_lag);
  void advance(GroupReduction& reduction);
  bool replicas_follow() const;
  void complete(UnitReduction& reduction);
  void complete(GroupReduction& reduction);
  void note_latency(UnitReduction& reduction);
  void note_own(Entry& entry);
  void square_there(Entry& entry);
  void warn_of_two_parts(Entry& entry);
  void end_reductions();
  Work sum_over_replicas(GroupReduction& reduction);
  float* scratch(UnitReduction& reduction, std::int64_t numel);
  void agree_on_order();
  DType bucket_dtype() const;

  const MemoryPlan& plan_;
  const MeshAxes& axes_;
  const ComputeDevice device_;
  GradientVisitor* const visitor_;
  PendingCopies copies_;  ///< waiting copies of gradients of all units
  std::vector<Entry> entries_;
  Memory memory_;
  UnitSlots buckets_, sums_;
  std::optional<BlockSums> blocks_;  ///< set where MemoryPlan::block_sums
  OnSummed on_summed_;
  OnReduced on_reduced_;
  std::function<void()> on_gradient_;
  std::uint64_t digest_ = 0;
  double weight_ = 0;
  std::int64_t samples_ = 0;
  std::vector<int> order_;      ///< unit indices
  std::vector<int> completed_;  ///< units completed this round, in this rank's order
  std::vector<char> was_late_;  ///< [unit]: it had a late gradient in the last round with a batch
  RoundLog* rounds_ = nullptr;
  std::span<LatencyHistogram> latencies_;  ///< empty: reductions are not timed
  CallClock clock_;
  std::size_t next_ = 0;  ///< index into order_
  bool order_agreed_ = false;
  std::vector<char> expected_;  ///< the argument of the last `expect`
  bool expects_all_ = true;     ///< whether a gradient of every trainable parameter is expected
  bool warned_ = false, warned_of_own_ = false;
  bool squares_own_ = false;
  double own_square_ = 0;                      ///< squared norm of the contributions since the last take_own_square
  GradientSquares* device_squares_ = nullptr;  ///< on a GPU
  std::vector<GradientPiece> pieces_;          ///< pieces of a unit, while they are handed to `device_squares_`
  bool uses_methods_ = true, has_hook_ = false;
  bool has_copy_ = false;   ///< whether residuals were copied before the step's first reduction
  std::int32_t round_ = 0;  ///< under "reproducible": this rank's microbatches that have joined the tree since `reset`
  std::optional<int> backup_;  ///< the argument of the last `begin_backup` since `reset`
  /// Reductions are numbered from 0; the k-th is in [k % size] until it is over.
  std::vector<std::unique_ptr<UnitReduction>> reductions_;
  std::int64_t started_ = 0, advanced_ = 0, over_ = 0;  ///< numbers of reductions
  ReducerCounts counts_;
};

}  // namespace tessera
