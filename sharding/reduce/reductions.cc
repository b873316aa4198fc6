#include "sharding/reduce/reductions.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/sum/joined_sum.h"
#include "runtime/comm/sum/sum_method.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"
#include "tessera/span.h"

namespace tessera {

// This file sums the buckets of one unit after the other over ranks.
//
// A UnitReduction is a unit under way: `begin` takes it, `add` starts the sum of a group over the shard axis, and
// `post` takes the unit's bucket. `follow` continues the reductions of the oldest units. `advance` does this rank's
// share of a sum, and may start the sum over the replicate axis. `complete` waits for both sums and reports the unit.
// An Accumulation adds a sum to the sums of earlier microbatches, while the sum is made or after that.

namespace {

/// Converts `numel` fp32 elements in place to `dtype`, at the beginning of the same memory. Writing never overtakes
/// reading, since an element of `dtype` is not longer than an fp32 element.
void narrow_in_place(std::byte* memory, DType dtype, std::int64_t numel, ComputeDevice device) {
  const Unrecorded unrecorded;
  // number of elements that fit into a cache, or that keep a GPU busy
  const std::int64_t chunk = device.is_queued ? 1 << 24 : 1 << 16;
  for (std::int64_t begin = 0; begin < numel; begin += chunk) {
    const std::int64_t count = std::min(chunk, numel - begin);
    const at::Tensor wide = flat_view(memory + begin * 4, DType::kF32, count, device.device);
    std::byte* const to = memory + begin * static_cast<std::int64_t>(size_of(dtype));
    flat_view(to, dtype, count, device.device).copy_(wide.to(scalar_type_of(dtype)));
  }
}

}  // namespace

static_assert(MemoryPlan::kMostUnderWay <= Collectives::kMostUnderWay);

/// Adds the pieces of the last sum to the sums of earlier reductions of the step, if there are any, and passes the
/// result to `visitor`. It is used for sums that the host makes.
class Reductions::Accumulation final : public SumVisitor {
 public:
  /// The result is written to `place`. `visitor` is null if no piece is visited.
  Accumulation(const FlatGroup& group, GradientVisitor* visitor, float* place)
      : group_(group), visitor_(visitor), place_(place) {}

  /// Makes the last sum be added to `earlier`. Sums are added in the order of these calls.
  void add_onto(const float* earlier) { earlier_[count_++] = earlier; }
  void add_onto(std::span<const float* const> earlier) {
    for (const float* each : earlier) add_onto(each);
  }
  bool adds() const { return count_ > 0; }
  float* place() const { return place_; }

  void visit(std::size_t offset, const float* values, std::size_t numel) override {
    if (offset == 0) visitor_->begin(group_);
    if (count_ > 0) {
      std::array<const float*, kMost> earlier{};
      std::transform(earlier_.begin(), earlier_.begin() + count_, earlier.begin(),
                     [&](const float* sum) { return sum + offset; });
      joined_sum({earlier.data(), count_}, values, place_ + offset, numel);
      values = place_ + offset;
    }
    visitor_->visit(group_, {values, numel});
  }

 private:
  static constexpr std::size_t kMost = SumCounter::kMostJoined;
  const FlatGroup& group_;
  GradientVisitor* const visitor_;
  float* const place_;
  std::size_t count_ = 0;
  std::array<const float*, kMost> earlier_{};
};

struct Reductions::GroupReduction {
  FlatGroup* group;
  float* sum;              ///< the sum over the shard axis
  std::int64_t numel;      ///< number of elements of `sum`
  float* total = nullptr;  ///< the sum over both axes; set when the last sum starts
  Accumulation accumulation;
  Work work, last;  ///< reductions over the shard axis and the replicate axis; last members, since they use the others
};

struct Reductions::UnitReduction {
  ReducedUnit* unit = nullptr;
  CallBegin begun;
  ReducedUnit::Memory bucket;
  float* scratch = nullptr;  ///< scratch of the plan
  std::int64_t scratch_taken = 0;
  std::vector<Arena> overflow_scratch;
  std::vector<GroupReduction> groups;  ///< groups of the unit; never more than were reserved, so their addresses do not
                                       ///< change
  Lease sum;                           ///< used if sums are offloaded
  NotesExchange::Notes notes;          ///< used if units are updated in backward
};

Reductions::Reductions(const ReduceSetup& setup, const Parts& parts, GradientVisitor* visitor, ReductionEnds& ends)
    : setup_(setup), parts_(parts), visitor_(visitor), ends_(ends) {}

Reductions::~Reductions() {
  for (const auto& reduction : reductions_) reduction->sum.drop();
}

void Reductions::take_memory(std::size_t most_groups, Arena& scratch, Arena& sums) {
  const MemoryPlan& plan = setup_.plan;
  for (std::int64_t i = 0; i < plan.sums().units_under_way(); ++i) {
    auto reduction = std::make_unique<UnitReduction>();
    reduction->scratch = reinterpret_cast<float*>(scratch.take(plan.sums().scratch_numel * 4));
    reduction->groups.reserve(most_groups);
    if (setup_.updates_in_backward()) {
      const auto numel = static_cast<std::size_t>(plan.sums().notes_numel);
      reduction->notes.values = {reinterpret_cast<float*>(sums.take(plan.sums().notes_numel * 4)), numel};
      reduction->notes.used.reserve(numel);
    }
    reductions_.push_back(std::move(reduction));
  }
}

void Reductions::time(std::span<LatencyHistogram> latencies, QueueTimes* queue) {
  latencies_ = latencies;
  clock_.use(queue);
}

void Reductions::begin(ReducedUnit& unit, Lease sum) {
  UnitReduction& reduction = this->reduction(started_++);
  reduction.unit = &unit;
  reduction.sum = std::move(sum);
  if (!latencies_.empty() && !setup_.is_alone) reduction.begun = clock_.begin();
}

void Reductions::post() {
  UnitReduction& reduction = newest();
  if (!setup_.accumulates()) reduction.bucket = std::exchange(reduction.unit->bucket, ReducedUnit::Memory());
  if (setup_.updates_in_backward()) parts_.notes.start(*reduction.unit, reduction.notes, waits());
}

/// Returns the sums to which a sum over ranks is added: the sums of earlier microbatches or, in a tree, the sums that
/// it joins.
Reductions::Accumulation Reductions::accumulation_of(const ReducedUnit& unit, const FlatGroup& group) const {
  Accumulation accumulation(group, visitor_, parts_.tree.place_of_sum(group));
  if (!setup_.makes_tree()) {
    if (unit.has_sum) accumulation.add_onto(group.gradient);
  } else if (!setup_.accumulates()) {
    accumulation.add_onto(parts_.tree.joined_by(group).span());
  }
  return accumulation;
}

/// Turns one bucket into this rank's part of the sum. The bucket is summed over the shard axis, then over the replicate
/// axis, and the result is added to the sums of earlier reductions of this step. Each of the two sums over ranks is a
/// reduce-scatter if gradients are cut over that axis, else an all-reduce. If BlockSums joins the ranks' sums, the sum
/// is complete, or queued, when this function returns.
void Reductions::add(FlatGroup& group) {
  UnitReduction& reduction = newest();
  const ReducedUnit& unit = *reduction.unit;
  std::byte* const bucket = parts_.buckets.of(unit, group);
  if (parts_.tree.has_blocks()) {
    parts_.counts.reduced_bytes += parts_.tree.join_blocks(group, reinterpret_cast<const float*>(bucket), visitor_);
    return;
  }
  if (setup_.is_alone) return;
  const AxisPlacement placement = setup_.plan.placement().gradients;
  const MeshPosition& mesh = setup_.mesh();
  const std::string& name = unit.unit->name;
  DType wire = parts_.buckets.dtype();
  if (setup_.plan.sums().bucket_mode == BucketMode::kAccumulator && setup_.plan.wire().reduce != DType::kF32) {
    wire = setup_.plan.wire().reduce;
    narrow_in_place(bucket, wire, group.layout.numel(), setup_.device);
  }
  ReduceOptions options = parts_.wire.shard_options(group, waits());
  parts_.counts.reduced_bytes += parts_.wire.bytes_of(group, wire, options);
  const std::int64_t numel = owned({placement.shard, false}, mesh, group.layout.numel()).numel;
  const bool replicated = mesh.replicate_size > 1;
  const Accumulation accumulation = accumulation_of(unit, group);
  float* sum =
      accumulation.adds() || (replicated && placement.replicate) ? scratch(reduction, numel) : accumulation.place();
  GroupReduction& started =
      reduction.groups.emplace_back(GroupReduction{&group, sum, numel, sum, accumulation, Work(), Work()});
  if (!replicated && !setup_.device.is_queued) options.visitor = &started.accumulation;
  Collectives& ranks = *setup_.axes.reduce;
  GradientMethod* const method = parts_.wire.method_of(group);
  const bool is_made_here = method && !options.method;  // a transport without a network ignores methods
  if (is_made_here) options.method = method;
  const ReduceCall call{placement.shard, name, bucket, wire, sum, static_cast<std::size_t>(numel), options};
  started.work = is_made_here ? Work(reduce_by_method(ranks, call)) : ranks.reduce(call);
}

/// Does this rank's share of all reductions except the last `lag`, and waits for all reductions except the last
/// `end_lag`.
void Reductions::follow(std::int64_t lag, std::int64_t end_lag) {
  for (; advanced_ < started_ - lag; ++advanced_) {
    UnitReduction& unit = reduction(advanced_);
    for (GroupReduction& group : unit.groups) advance(group);
    throw_if_error(unit.notes.work.advance());
  }
  for (; over_ < started_ - end_lag; ++over_) complete(reduction(over_));
}

void Reductions::end() {
  if (over_ == started_) return;
  const Span span("end reductions", {}, &parts_.counts.reduction_seconds);
  follow(0, 0);
}

/// Returns whether the sum over the replicate axis starts as soon as this rank's share of a reduction is done, and ends
/// with the reduction. Otherwise the sum over the replicate axis is made at the end. An early start is possible if work
/// is queued, since the queue can wait for the sum over the shard axis. It is also possible over a network, which works
/// while ranks compute.
bool Reductions::replicas_follow() const {
  return setup_.mesh().replicate_size > 1 && (setup_.device.is_queued || setup_.plan.sums().end_lag > 0);
}

void Reductions::advance(GroupReduction& reduction) {
  throw_if_error(reduction.work.advance());
  if (!replicas_follow()) return;
  {
    const Timed timed(setup_.device.waits);
    throw_if_error(reduction.work.wait());
  }
  reduction.last = sum_over_replicas(reduction);
}

void Reductions::complete(UnitReduction& reduction) {
  ReducedUnit& unit = *reduction.unit;
  for (GroupReduction& group : reduction.groups) complete(group);
  if (!latencies_.empty()) clock_.end(reduction.begun, latencies_[static_cast<std::size_t>(unit.unit->index)]);
  ends_.summed(unit);
  if (setup_.updates_in_backward()) ends_.agreed(unit, parts_.notes.end(unit.unit->name, reduction.notes));
  reduction.sum.give_back();
  reduction.groups.clear();
  parts_.buckets.free_bucket(reduction.bucket);
  for (const Arena& arena : reduction.overflow_scratch) parts_.counts.hold(-arena.bytes());
  reduction.overflow_scratch.clear();
  reduction.scratch_taken = 0;
}

void Reductions::complete(GroupReduction& reduction) {
  {
    const Timed timed(setup_.device.waits);
    throw_if_error(reduction.work.wait());
    throw_if_error(reduction.last.wait());
  }
  if (!setup_.device.is_queued) {
    if (setup_.mesh().replicate_size > 1 && !replicas_follow()) throw_if_error(sum_over_replicas(reduction).wait());
    return;
  }
  if (!reduction.accumulation.adds()) return;
  const Unrecorded unrecorded;
  const std::int64_t numel = reduction.group->gradient_part.numel;
  const at::Tensor gradient = flat_view(reduction.group->gradient, DType::kF32, numel, setup_.device.device);
  gradient.add_(flat_view(reduction.total, DType::kF32, numel, setup_.device.device));
}

Work Reductions::sum_over_replicas(GroupReduction& reduction) {
  const FlatGroup& group = *reduction.group;
  const std::string& name = group.unit->name;
  Collectives& replicas = *setup_.axes.replicate;
  float* const sum = reduction.sum;
  ReduceOptions options = parts_.wire.replicate_options(group, replicas_follow() ? Waits::kLater : Waits::kAtOnce);
  if (!setup_.device.is_queued) options.visitor = &reduction.accumulation;
  if (!setup_.plan.placement().gradients.replicate) {
    return replicas.all_reduce(name, sum, DType::kF32, sum, reduction.numel, options);
  }
  const Extent part = group.gradient_part;
  const Accumulation& accumulation = reduction.accumulation;
  reduction.total = accumulation.adds() ? sum + part.offset % reduction.numel : accumulation.place();
  return replicas.reduce_scatter(name, sum, DType::kF32, reduction.total, part.numel, options);
}

float* Reductions::scratch(UnitReduction& reduction, std::int64_t numel) {
  if (reduction.scratch_taken + numel <= setup_.plan.sums().scratch_numel) {
    float* const memory = reduction.scratch + reduction.scratch_taken;
    reduction.scratch_taken += numel;
    return memory;
  }
  Arena& arena =
      reduction.overflow_scratch.emplace_back(Arena::plain("overflow scratch", numel * 4, setup_.device.device));
  parts_.counts.hold(arena.bytes());
  return reinterpret_cast<float*>(arena.take(arena.bytes()));
}

}  // namespace tessera
