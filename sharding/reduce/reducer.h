#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "runtime/comm/mesh_groups.h"
#include "sharding/arena.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/compress/kept_gradients.h"
#include "sharding/compute_device.h"
#include "sharding/gather/unit_slots.h"
#include "sharding/reduce/gradient_packer.h"
#include "sharding/reduce/gradient_store.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/round_log.h"
#include "sharding/unit.h"
#include "sharding/unit_agreement.h"

namespace tessera {

struct ReducerCounts {
  std::int64_t reductions = 0;        ///< units reduced over the shard axis
  std::int64_t reduced_bytes = 0;     ///< bytes of gradients sent into reductions
  double reduction_seconds = 0;       ///< in reductions, waiting for other ranks included
  std::int64_t overflow_buckets = 0;  ///< buckets beyond the plan, for gradients that came in another order
  std::int64_t overflow_bytes = 0;    ///< of buckets and scratch beyond the plan, held now
  std::int64_t overflow_peak = 0;     ///< the most of them since `reset`
};

/// Takes each gradient as backward makes it, packs it into its unit's bucket, and reduces a unit when it is complete.
///
/// Units are reduced in one agreed order on all ranks, whatever order their gradients come in: first the reverse of
/// their definition, from the second step on the order in which rank 0 completed them in the first. A unit that a rank
/// did not use takes part with zeros, at the latest when backward ends. So ranks may take different branches.
///
/// Parameters that no rank used in the last step (`expect`) are not waited for, so that their units keep no bucket from
/// the others. When the set of used parameters changes, the step of the change may need buckets beyond the plan, and the
/// order is agreed again.
///
/// A gradient's way: `.grad` (parameter dtype) -> bucket (reduce dtype; one copy) -> sum over ranks (fp32) ->
/// `FlatGroup::gradient`. Sums are plain: 1/N, loss scale and clip enter in the optimizer's pass. The last sum of the
/// way adds onto earlier microbatches and shows the result to a GradientVisitor, all while it is in cache.
///
/// Where the plan has the buckets for it (MemoryPlan::reduction_lag), a unit that is complete only starts its reduction.
/// Some units later this rank does its share of it, and some units after that waits for its end; both at places that
/// are the same on all ranks (Collectives::reduce_scatter).
///
/// A parameter can get several gradients in one backward, when activation recomputation runs parts of the graph apart.
/// They are added while the unit's bucket is open, and after that reduced once more and added to the sum.
///
/// Where sums lie below memory, a unit's sum has memory from the start of its reduction to its end.
///
/// Where units are updated in backward (PlanInput::updates_in_backward), a unit whose sum is there is handed to whoever
/// updates it, and the sum's place is the next unit's. From the start of its reduction on, when this rank has read the unit
/// for the last time, the unit is closed (Unit::close): so when a sum is there, all ranks have. Which parameters a rank
/// used, and in which order it gathered units in forward, travels with the unit's reduction. A gradient that comes after
/// that is an error.
class Reducer {
 public:
  /// A unit whose gradients are summed, or will be where work is queued; in place until this returns.
  using OnSummed = std::function<void(Unit& unit, const UnitAgreement& agreed)>;

  /// A unit whose sum of this round is there, or queued where work is: FlatGroup::gradient of its groups. Once more where a gradient comes
  /// after that.
  using OnReduced = std::function<void(const Unit& unit)>;

  /// Memory of the plan, on `device`: buckets and, where units are updated in backward, sums are shared with peers.
  struct Memory {
    Arena buckets, scratch, sums;
    Arena feedback = {};  ///< MemoryCategory::kFeedback; zeros
    /// Has the sums where MemoryPlan::gradients_below.
    GradientStore* store = nullptr;
  };

  /// `visitor` sees every reduced gradient; where there is one rank, nothing is reduced. Null where work is queued, since
  /// what is not there yet cannot be seen.
  Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Memory memory, ComputeDevice device,
          GradientVisitor* visitor);
  ~Reducer();

  /// Who updates units in backward.
  void on_summed(OnSummed update) { on_summed_ = std::move(update); }

  /// Who is told of sums.
  void on_reduced(OnReduced told) { on_reduced_ = std::move(told); }
  /// `told`: each time that a gradient has come.
  void on_gradient(std::function<void()> told) { on_gradient_ = std::move(told); }

  /// From now on `rounds` hears of every reduction that begins. It outlives this.
  void tell(RoundLog& rounds) { rounds_ = &rounds; }

  /// For a rank without a batch, where the others begin the reduction of a unit in the order agreed on: it takes part with zeros.
  void reduce_nothing();

  /// A program's rule makes the sums of all gradients, over any transport.
  void sum_by(const std::shared_ptr<CommHook>& hook);

  /// A backward begins, where units are updated in it. `digest` of what ranks must have done alike so far; `weight`: of this rank's
  /// microbatch (UnitAgreement).
  void begin_round(std::uint64_t digest, double weight) { digest_ = digest, weight_ = weight; }

  /// Called from the hook: `parameter`'s gradient is in `.grad`; it is taken and reset. Where it does not count, zeros take its place, and
  /// it makes no parameter a used one.
  void take(FlatGroup& group, std::size_t parameter, bool counts = true);

  /// Ends a microbatch's backward. With `reduce` false, gradients stay in their (unsharded) accumulators. Afterwards
  /// every unit's gradient is in place. `has_batch` false: this rank did nothing, and what the others reduce late is what was late in the
  /// last backward.
  void finish(bool reduce, bool has_batch = true);

  /// To be called after the optimizer has used the gradients: the next gradient taken starts a new sum.
  void reset();

  /// What gradients on the wire lacked so far (CompressionConfig::error_feedback, GradientMethod) is not added to those to come.
  void forget_feedback();
  /// The step's gradients are dropped: what was kept is again what it was before them, where there is a copy (restore_skipped). Else it
  /// begins anew.
  void restore_feedback();
  /// The memory that holds it, of every group. Between steps it may be read and written.
  KeptGradients kept();

  /// Of the step under way, counted from 1, and from the next reduction on: whether a GradientMethod makes the sums, where there is one.
  void use_methods(bool on, std::int64_t step);

  /// `used` says of each parameter whether any rank used it in the last step [trainable parameter, in unit, group, layout
  /// order]; the same on all ranks. To be called between steps.
  void expect(const std::vector<char>& used);

  /// Did this parameter get a gradient on this rank since `reset`?
  bool used(const FlatGroup& group, std::size_t parameter) const;

  /// Indices of the units that have gradients, in the order in which they are reduced.
  std::span<const int> order() const { return order_; }
  const ReducerCounts& counts() const { return counts_; }

 private:
  enum class Phase : std::uint8_t { kIdle, kFilling, kReady };
  /// Of a group, where error feedback is kept, and what makes its sums; null where not.
  struct Feedback {
    float* shard = nullptr;
    float* replicate = nullptr;
    std::unique_ptr<GradientMethod> method = {};
  };
  /// Memory for a unit's gradients until they are reduced, or for their sum.
  struct Bucket {
    std::byte* memory = nullptr;
    int slot = UnitSlots::kNone;
    Arena overflow;  ///< where there was no slot
  };
  struct Entry {
    Entry(Unit* unit, GradientPacker gradients) : unit(unit), gradients(std::move(gradients)) {}

    Unit* unit;
    GradientPacker gradients;
    std::int64_t bucket_bytes = 0, sum_bytes = 0;
    Phase phase = Phase::kIdle;
    Bucket bucket;
    Bucket sum;                      ///< where units are updated in backward
    std::vector<Feedback> feedback;  ///< [group]
    bool reduced = false;            ///< this round
    bool has_sum = false;            ///< gradient holds a sum since reset, or will
    std::int64_t taken = 0,
                 told = 0;  ///< gradients of this round, where nothing is reduced; those of which `on_reduced` was told
  };
  class Accumulation;
  struct GroupReduction;
  struct UnitReduction;

  Entry& entry(const Unit& unit) { return entries_[unit.index]; }
  /// Whether gradients gather where they are until `finish`; else a unit is reduced as soon as it is complete.
  bool accumulates() const;
  bool is_alone_in_place() const;
  bool updates_in_backward() const { return plan_.input().updates_in_backward; }
  void expect_not_updated(const Entry& entry, const FlatGroup& group, std::size_t parameter) const;
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
  /// Whether the unit's gradients wait in their sum's own place.
  bool is_in_place(const Entry& entry) const;
  /// Where a group's gradients wait: in their sum's own place, or behind the unit's earlier groups in its bucket.
  std::byte* bucket_of(const Entry& entry, const FlatGroup& group) const;
  void launch_ready();
  void tell(Entry& entry);
  void reduce_late(bool has_batch);
  std::vector<char> late_anywhere() const;
  void note_overflow(const Arena& arena);
  void reduce(Entry& entry);
  UnitReduction& reduction(std::int64_t number);
  void start(Entry& entry);
  void open_sum(const Entry& entry);
  void start_group(UnitReduction& reduction, FlatGroup& group);
  void follow(std::int64_t lag, std::int64_t end_lag);
  void advance(GroupReduction& reduction);
  bool replicas_follow() const;
  void complete(UnitReduction& reduction);
  void complete(GroupReduction& reduction);
  void end_reductions();
  Work sum_over_replicas(GroupReduction& reduction);
  float* scratch(UnitReduction& reduction, std::int64_t numel);
  void agree_on_order();
  DType bucket_dtype() const;

  const MemoryPlan& plan_;
  const MeshAxes& axes_;
  const ComputeDevice device_;
  GradientVisitor* const visitor_;
  PendingCopies copies_;  ///< of gradients of all units
  std::vector<Entry> entries_;
  Memory memory_;
  UnitSlots buckets_, sums_;
  OnSummed on_summed_;
  OnReduced on_reduced_;
  std::function<void()> on_gradient_;
  std::uint64_t digest_ = 0;
  double weight_ = 0;
  std::vector<int> order_;      ///< unit indices
  std::vector<int> completed_;  ///< of this round, in this rank's order
  std::vector<char> was_late_;  ///< [unit]: it had a late gradient in the last round with a batch
  RoundLog* rounds_ = nullptr;
  std::size_t next_ = 0;  ///< into order_
  bool order_agreed_ = false;
  std::vector<char> expected_;  ///< what `expect` was told last
  bool expects_all_ = true;     ///< a gradient of every trainable parameter
  bool warned_ = false;
  bool uses_methods_ = true, has_hook_ = false;
  bool has_copy_ = false;  ///< what was kept before the first reduction of the step under way was copied
  /// Reductions are numbered from 0; the k-th is in [k % size] until it is over.
  std::vector<std::unique_ptr<UnitReduction>> reductions_;
  std::int64_t started_ = 0, advanced_ = 0, over_ = 0;  ///< how many
  ReducerCounts counts_;
};

}  // namespace tessera
