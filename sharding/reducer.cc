#include "sharding/reducer.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "runtime/base/trace.h"
#include "runtime/comm/pairwise_sum.h"
#include "sharding/dtype.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

at::Tensor tensor_at(std::byte* memory, DType dtype, const FlatParameter& flat) {
  return at::from_blob(memory, flat.sizes, flat.strides, at::TensorOptions(scalar_type_of(dtype)));
}

/// Whether `gradient` lies as `flat` does, so that its bytes may be copied. A large one is left to LibTorch where that
/// would copy with several threads.
bool is_copied_bytewise(const at::Tensor& gradient, DType dtype, const FlatParameter& flat) {
  return gradient.scalar_type() == scalar_type_of(dtype) && gradient.layout() == at::kStrided &&
         gradient.is_non_overlapping_and_dense() && gradient.sizes() == at::IntArrayRef(flat.sizes) &&
         gradient.strides() == at::IntArrayRef(flat.strides) &&
         (gradient.numel() < at::internal::GRAIN_SIZE || at::get_num_threads() == 1);
}

/// Narrows `numel` fp32 in place into `dtype` at the front of the same memory. Writing never overtakes reading, since
/// an element of `dtype` is at most as long.
void narrow_in_place(std::byte* memory, DType dtype, std::int64_t numel) {
  const Unrecorded unrecorded;
  constexpr std::int64_t kChunk = 1 << 16;
  const auto from_type = at::TensorOptions(at::kFloat), to_type = at::TensorOptions(scalar_type_of(dtype));
  for (std::int64_t begin = 0; begin < numel; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, numel - begin);
    const at::Tensor narrowed = at::from_blob(memory + begin * 4, {count}, from_type).to(to_type.dtype());
    std::byte* const to = memory + begin * static_cast<std::int64_t>(size_of(dtype));
    std::memcpy(to, narrowed.const_data_ptr(), narrowed.nbytes());
  }
}

}  // namespace

static_assert(MemoryPlan::kMostUnderWay <= Collectives::kMostUnderWay);

/// Adds the last sum's pieces onto what earlier reductions of the step left in `group.gradient` (or finds them there),
/// and shows it to `visitor`.
class Reducer::Accumulation final : public SumVisitor {
 public:
  Accumulation(const FlatGroup& group, bool adds, GradientVisitor& visitor)
      : group_(group), adds_(adds), visitor_(visitor) {}

  void visit(std::size_t offset, const float* values, std::size_t numel) override {
    if (offset == 0) visitor_.begin(group_);
    if (adds_) {
      float* gradient = group_.gradient + offset;
      pairwise_sum(std::array<const void*, 2>{gradient, values}, DType::kF32, gradient, numel);
      values = gradient;
    }
    visitor_.visit(group_, {values, numel});
  }

 private:
  const FlatGroup& group_;
  const bool adds_;
  GradientVisitor& visitor_;
};

struct Reducer::GroupReduction {
  FlatGroup* group;
  bool adds;                  ///< onto what earlier reductions of the step left
  float* sum;                 ///< over the shard axis
  std::int64_t numel;         ///< of `sum`
  Accumulation accumulation;
  Work work;                  ///< over the shard axis. The last member, since it uses the others.
};

struct Reducer::UnitReduction {
  Bucket bucket;
  float* scratch = nullptr;   ///< planned
  std::int64_t scratch_taken = 0;
  std::vector<Arena> overflow_scratch;
  std::vector<GroupReduction> groups;  ///< never more than were reserved, so they stay where they are
};

Reducer::~Reducer() = default;

Reducer::Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Arena buckets, Arena scratch,
                 GradientVisitor& visitor)
    : plan_(plan), axes_(axes), visitor_(visitor), buckets_(std::move(buckets)), scratch_(std::move(scratch)) {
  for (Unit* unit : units) {
    Entry& entry = entries_.emplace_back();
    entry.unit = unit;
    for (auto& group : unit->groups) {
      const std::size_t count = group->trainable ? group->parameters.size() : 0;
      entry.expected += static_cast<std::int64_t>(count);
      entry.arrived.emplace_back(count, 0);
      entry.used.emplace_back(count, 0);
    }
    if (entry.expected > 0) order_.insert(order_.begin(), unit->index);
    if (plan_.bucket_mode() == BucketMode::kAccumulator) {
      entry.bucket.memory = buckets_.take(plan_.bucket_bytes_of(unit->shape()));
    }
  }
  if (plan_.bucket_mode() == BucketMode::kShared) {
    slots_.push_back({buckets_.take(plan_.bucket_bytes_of(units[0]->shape()))});
    for (std::int64_t i = 0; i < plan_.shared_buckets(); ++i) slots_.push_back({buckets_.take(plan_.bucket_bytes())});
  }
  buckets_.expect_full();
  std::size_t most_groups = 0;
  for (Unit* unit : units) most_groups = std::max(most_groups, unit->groups.size());
  for (std::int64_t i = 0; i < plan_.units_under_way(); ++i) {
    auto reduction = std::make_unique<UnitReduction>();
    reduction->scratch = reinterpret_cast<float*>(scratch_.take(plan_.scratch_numel() * 4));
    reduction->groups.reserve(most_groups);
    reductions_.push_back(std::move(reduction));
  }
  scratch_.expect_full();
}

bool Reducer::accumulates() const {
  const BucketMode mode = plan_.bucket_mode();
  return plan_.input().mesh.world_size() == 1 || mode == BucketMode::kAccumulator ||
         (mode == BucketMode::kInPlace && plan_.input().accumulation > 1);
}

DType Reducer::bucket_dtype() const {
  return plan_.bucket_mode() == BucketMode::kShared ? plan_.input().reduce : DType::kF32;
}

void Reducer::take(FlatGroup& group, std::size_t parameter) {
  Entry& entry = this->entry(*group.unit);
  at::Tensor& gradient = group.parameters[parameter].tensor.mutable_grad();
  const bool was_ready = entry.phase == Phase::kReady;  // and one more gradient comes: it is added
  if (entry.phase == Phase::kIdle) open(entry);
  store(entry, group, parameter, gradient);
  gradient.reset();
  const bool complete = entry.arrived_count == entry.expected && !accumulates();
  if (!complete || was_ready) return;
  entry.phase = Phase::kReady;
  if (entry.reduced) return;  // a late gradient: reduced once more when the round ends
  completed_.push_back(entry.unit->index);
  launch_ready();
}

void Reducer::open(Entry& entry) {
  entry.phase = Phase::kFilling;
  if (accumulates()) return;  // arrivals last until reset
  entry.arrived_count = 0;
  for (auto& group : entry.arrived) std::fill(group.begin(), group.end(), 0);
  if (plan_.bucket_mode() == BucketMode::kInPlace) {
    if (entry.reduced) open_overflow(entry);  // its own place holds the sum
    return;
  }
  const auto begin = entry.unit->index == 0 ? slots_.begin() : slots_.begin() + 1;
  const auto end = entry.unit->index == 0 ? slots_.begin() + 1 : slots_.end();
  const auto slot = std::find_if(begin, end, [](const Slot& slot) { return !slot.taken; });
  if (slot == end) {
    open_overflow(entry);
    return;
  }
  slot->taken = true;
  entry.bucket.memory = slot->memory;
  entry.bucket.slot = static_cast<int>(slot - slots_.begin());
}

void Reducer::open_overflow(Entry& entry) {
  ++counts_.overflow_buckets;
  Bucket& bucket = entry.bucket;
  bucket.overflow = Arena::plain("overflow bucket", plan_.bucket_bytes_of(entry.unit->shape()));
  counts_.overflow_bytes += bucket.overflow.bytes();
  bucket.memory = bucket.overflow.take(bucket.overflow.bytes());
}

void Reducer::free(Bucket& bucket) {
  if (bucket.slot >= 0) slots_[bucket.slot].taken = false;
  counts_.overflow_bytes -= bucket.overflow.bytes();
  bucket = Bucket();
}

void Reducer::store(Entry& entry, FlatGroup& group, std::size_t parameter, const at::Tensor& gradient) {
  const FlatParameter& flat = group.parameters[parameter];
  const DType dtype = bucket_dtype();
  const std::int64_t offset = group.layout.extent(parameter).offset * static_cast<std::int64_t>(size_of(dtype));
  std::byte* place = bucket_of(entry, group) + offset;
  char& arrived = entry.arrived[group.index][parameter];
  if (!arrived && is_copied_bytewise(gradient, dtype, flat)) {
    std::memcpy(place, gradient.const_data_ptr(), gradient.nbytes());
  } else {
    const Unrecorded unrecorded;
    const at::Tensor bucket = tensor_at(place, dtype, flat);
    arrived ? bucket.add_(gradient) : bucket.copy_(gradient);
  }
  entry.arrived_count += arrived ? 0 : 1;
  arrived = 1;
  entry.used[group.index][parameter] = 1;
}

std::byte* Reducer::bucket_of(const Entry& entry, const FlatGroup& group) const {
  const bool in_place = plan_.bucket_mode() == BucketMode::kInPlace && entry.bucket.overflow.bytes() == 0;
  if (in_place) return reinterpret_cast<std::byte*>(group.gradient);
  std::byte* bucket = entry.bucket.memory;
  for (std::size_t i = 0; i < group.index; ++i) {
    const FlatGroup& before = *entry.unit->groups[i];
    if (before.trainable) bucket += before.layout.numel() * size_of(bucket_dtype());
  }
  return bucket;
}

/// Zeros wherever no gradient came: unused parameters and padding.
void Reducer::fill_missing(const Entry& entry, const FlatGroup& group) {
  const auto element = size_of(bucket_dtype());
  std::byte* bucket = bucket_of(entry, group);
  const auto clear = [&](Extent extent) { std::memset(bucket + extent.offset * element, 0, extent.numel * element); };
  for (Extent gap : group.layout.gaps()) clear(gap);
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    if (!entry.arrived[group.index][i]) clear(group.layout.extent(i));
  }
}

void Reducer::launch_ready() {
  while (next_ < order_.size() && entries_[order_[next_]].phase == Phase::kReady) reduce(entries_[order_[next_++]]);
}

void Reducer::reduce(Entry& entry) {
  const Span span("reduce", entry.unit->name, &counts_.reduction_seconds);
  start(entry);
  follow(plan_.reduction_lag());
}

Reducer::UnitReduction& Reducer::reduction(std::int64_t number) {
  return *reductions_[static_cast<std::size_t>(number) % reductions_.size()];
}

void Reducer::start(Entry& entry) {
  UnitReduction& reduction = this->reduction(started_++);
  for (auto& group : entry.unit->groups) {
    if (!group->trainable) continue;
    fill_missing(entry, *group);
    start_group(reduction, *group);
  }
  ++counts_.reductions;
  entry.reduced = true;
  entry.has_sum = true;
  entry.phase = Phase::kIdle;
  if (!accumulates()) reduction.bucket = std::exchange(entry.bucket, Bucket());
}

/// One bucket -> this rank's part of the sum: over the shard axis, then over the replicate axis, then onto what earlier
/// reductions of this step left. Each is a reduce-scatter where the placement says sharded, else an all-reduce.
void Reducer::start_group(UnitReduction& reduction, FlatGroup& group) {
  const AxisPlacement placement = plan_.input().placement.gradients;
  const MeshPosition& mesh = plan_.input().mesh;
  const Entry& entry = this->entry(*group.unit);
  const std::string& name = group.unit->name;
  if (mesh.world_size() == 1) return;  // gradients are taken straight into place
  std::byte* bucket = bucket_of(entry, group);
  DType wire = bucket_dtype();
  if (plan_.bucket_mode() == BucketMode::kAccumulator && plan_.input().reduce != DType::kF32) {
    wire = plan_.input().reduce;
    narrow_in_place(bucket, wire, group.layout.numel());
  }
  counts_.reduced_bytes += group.layout.numel() * static_cast<std::int64_t>(size_of(wire));
  const std::int64_t numel = owned({placement.shard, false}, mesh, group.layout.numel()).numel;
  const bool replicated = mesh.replicate_size > 1, adds = entry.has_sum;
  float* sum = adds || (replicated && placement.replicate) ? scratch(reduction, numel) : group.gradient;
  const Accumulation accumulation(group, adds, visitor_);
  GroupReduction& started =
      reduction.groups.emplace_back(GroupReduction{&group, adds, sum, numel, accumulation, Work()});
  SumVisitor* last = replicated ? nullptr : &started.accumulation;
  const Waits waits = plan_.reduction_lag() == 0 ? Waits::kAtOnce : Waits::kLater;
  started.work = placement.shard ? axes_.reduce->reduce_scatter(name, bucket, wire, sum, numel, last, waits)
                                 : axes_.reduce->all_reduce(name, bucket, wire, sum, numel, last, waits);
}

/// Does this rank's share of all reductions but the last `lag`, and ends all but the last 2 * `lag`.
void Reducer::follow(std::int64_t lag) {
  for (; advanced_ < started_ - lag; ++advanced_) {
    for (GroupReduction& group : reduction(advanced_).groups) throw_if_error(group.work.advance());
  }
  for (; over_ < started_ - 2 * lag; ++over_) complete(reduction(over_));
}

void Reducer::complete(UnitReduction& reduction) {
  for (GroupReduction& group : reduction.groups) {
    throw_if_error(group.work.wait());
    if (plan_.input().mesh.replicate_size > 1) sum_over_replicas(group);
  }
  reduction.groups.clear();
  free(reduction.bucket);
  for (const Arena& arena : reduction.overflow_scratch) counts_.overflow_bytes -= arena.bytes();
  reduction.overflow_scratch.clear();
  reduction.scratch_taken = 0;
}

void Reducer::sum_over_replicas(GroupReduction& reduction) {
  const FlatGroup& group = *reduction.group;
  const std::string& name = group.unit->name;
  float* const sum = reduction.sum;
  SumVisitor* const last = &reduction.accumulation;
  if (!plan_.input().placement.gradients.replicate) {
    throw_if_error(axes_.replicate->all_reduce(name, sum, DType::kF32, sum, reduction.numel, last).wait());
    return;
  }
  const Extent part = group.gradient_part;
  float* const output = reduction.adds ? sum + part.offset % reduction.numel : group.gradient;
  throw_if_error(axes_.replicate->reduce_scatter(name, sum, DType::kF32, output, part.numel, last).wait());
}

float* Reducer::scratch(UnitReduction& reduction, std::int64_t numel) {
  if (reduction.scratch_taken + numel <= plan_.scratch_numel()) {
    float* const memory = reduction.scratch + reduction.scratch_taken;
    reduction.scratch_taken += numel;
    return memory;
  }
  Arena& arena = reduction.overflow_scratch.emplace_back(Arena::plain("overflow scratch", numel * 4));
  counts_.overflow_bytes += arena.bytes();
  return reinterpret_cast<float*>(arena.take(arena.bytes()));
}

void Reducer::finish(bool reduce_now) {
  if (accumulates()) {
    if (!reduce_now) return;
    for (int index : order_) reduce(entries_[index]);
    end_reductions();
    return;
  }
  // What is left, in order; a unit without a gradient takes part with zeros.
  for (; next_ < order_.size(); ++next_) {
    Entry& entry = entries_[order_[next_]];
    if (entry.phase == Phase::kIdle) open(entry);
    if (!entry.reduced && entry.phase == Phase::kFilling) completed_.push_back(entry.unit->index);
    reduce(entry);
  }
  // Gradients that came after their unit had been reduced.
  for (int index : order_) {
    if (entries_[index].phase != Phase::kIdle) reduce(entries_[index]);
  }
  end_reductions();
  for (Entry& entry : entries_) entry.reduced = false;
  next_ = 0;
  if (!order_agreed_) agree_on_order();
  completed_.clear();
}

void Reducer::end_reductions() {
  if (over_ == started_) return;
  const Span span("end reductions", {}, &counts_.reduction_seconds);
  follow(0);
}

void Reducer::agree_on_order() {
  std::vector<std::int32_t> order(completed_.begin(), completed_.end());
  TORCH_INTERNAL_ASSERT(order.size() == order_.size());
  throw_if_error(axes_.world->broadcast("bucket order", order.data(), order.size() * sizeof(order[0]), 0).wait());
  order_.assign(order.begin(), order.end());
  order_agreed_ = true;
}

void Reducer::reset() {
  for (Entry& entry : entries_) {
    entry.has_sum = false;
    entry.arrived_count = 0;
    for (auto& group : entry.arrived) std::fill(group.begin(), group.end(), 0);
    for (auto& group : entry.used) std::fill(group.begin(), group.end(), 0);
  }
}

bool Reducer::used(const FlatGroup& group, std::size_t parameter) const {
  return entries_[group.unit->index].used[group.index][parameter] != 0;
}

}  // namespace tessera
