#include "sharding/reducer.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <array>
#include <cstring>

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

/// Adds the last sum's pieces onto what earlier reductions of the step left in `group.gradient` (or finds them there),
/// and shows it to `visitor`.
class Accumulation final : public SumVisitor {
 public:
  Accumulation(const FlatGroup& group, bool adds, GradientVisitor& visitor)
      : group_(group), adds_(adds), visitor_(visitor) {
    visitor_.begin(group_);
  }

  void visit(std::size_t offset, const float* values, std::size_t numel) override {
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

}  // namespace

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
      entry.bucket = buckets_.take(plan_.bucket_bytes_of(unit->shape()));
    }
  }
  if (plan_.bucket_mode() == BucketMode::kShared) {
    root_bucket_ = buckets_.take(plan_.bucket_bytes_of(units[0]->shape()));
    for (std::int64_t i = 0; i < plan_.shared_buckets(); ++i) {
      shared_buckets_.push_back(buckets_.take(plan_.bucket_bytes()));
    }
    bucket_taken_.resize(shared_buckets_.size());
  }
  buckets_.expect_full();
  scratch_numel_ = plan_.scratch_numel();
  scratch_memory_ = reinterpret_cast<float*>(scratch_.take(scratch_numel_ * 4));
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
  if (entry.unit->index == 0) {
    entry.bucket = root_bucket_;
    return;
  }
  const auto free = std::find(bucket_taken_.begin(), bucket_taken_.end(), 0);
  if (free != bucket_taken_.end()) {
    *free = 1;
    entry.slot = static_cast<int>(free - bucket_taken_.begin());
    entry.bucket = shared_buckets_[entry.slot];
    return;
  }
  open_overflow(entry);
}

void Reducer::open_overflow(Entry& entry) {
  ++counts_.overflow_buckets;
  entry.overflow = Arena::plain("overflow bucket", plan_.bucket_bytes_of(entry.unit->shape()));
  counts_.overflow_bytes += entry.overflow.bytes();
  entry.bucket = entry.overflow.take(entry.overflow.bytes());
}

void Reducer::close(Entry& entry) {
  entry.phase = Phase::kIdle;
  if (accumulates()) return;
  if (entry.slot >= 0) bucket_taken_[entry.slot] = 0;
  counts_.overflow_bytes -= entry.overflow.bytes();
  entry.overflow = Arena();
  entry.slot = -1;
  entry.bucket = nullptr;
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
  const bool in_place = plan_.bucket_mode() == BucketMode::kInPlace && entry.overflow.bytes() == 0;
  if (in_place) return reinterpret_cast<std::byte*>(group.gradient);
  std::byte* bucket = entry.bucket;
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
  for (auto& group : entry.unit->groups) {
    if (!group->trainable) continue;
    fill_missing(entry, *group);
    reduce_group(entry, *group);
  }
  ++counts_.reductions;
  entry.reduced = true;
  entry.has_sum = true;
  close(entry);
}

/// One bucket -> this rank's part of the sum: over the shard axis, then over the replicate axis, then onto what earlier
/// reductions of this step left. Each is a reduce-scatter where the placement says sharded, else an all-reduce.
void Reducer::reduce_group(Entry& entry, FlatGroup& group) {
  const AxisPlacement placement = plan_.input().placement.gradients;
  const MeshPosition& mesh = plan_.input().mesh;
  const std::string& name = entry.unit->name;
  if (mesh.world_size() == 1) return;  // gradients are taken straight into place
  std::byte* bucket = bucket_of(entry, group);
  DType wire = bucket_dtype();
  if (plan_.bucket_mode() == BucketMode::kAccumulator && plan_.input().reduce != DType::kF32) {
    wire = plan_.input().reduce;
    narrow_in_place(bucket, wire, group.layout.numel());
  }
  counts_.reduced_bytes += group.layout.numel() * static_cast<std::int64_t>(size_of(wire));
  const std::int64_t first_numel = owned({placement.shard, false}, mesh, group.layout.numel()).numel;
  const bool replicated = mesh.replicate_size > 1, narrows = replicated && placement.replicate;
  Accumulation accumulation(group, entry.has_sum, visitor_);
  float* sum = entry.has_sum || narrows ? scratch(first_numel) : group.gradient;
  SumVisitor* last = replicated ? nullptr : &accumulation;
  Work over_shard = placement.shard ? axes_.reduce->reduce_scatter(name, bucket, wire, sum, first_numel, last)
                                    : axes_.reduce->all_reduce(name, bucket, wire, sum, first_numel, last);
  throw_if_error(over_shard.wait());
  if (!replicated) return;
  float* part = entry.has_sum ? sum + group.gradient_part.offset % first_numel : group.gradient;
  Work over_replicas =
      narrows ? axes_.replicate->reduce_scatter(name, sum, DType::kF32, part, group.gradient_part.numel, &accumulation)
              : axes_.replicate->all_reduce(name, sum, DType::kF32, sum, first_numel, &accumulation);
  throw_if_error(over_replicas.wait());
}

float* Reducer::scratch(std::int64_t numel) {
  if (numel > scratch_numel_) {
    counts_.overflow_bytes += numel * 4 - overflow_scratch_.bytes();
    overflow_scratch_ = Arena::plain("overflow scratch", numel * 4);
    scratch_memory_ = reinterpret_cast<float*>(overflow_scratch_.take(numel * 4));
    scratch_numel_ = numel;
  }
  return scratch_memory_;
}

void Reducer::finish(bool reduce_now) {
  if (accumulates()) {
    if (!reduce_now) return;
    for (int index : order_) reduce(entries_[index]);
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
  for (Entry& entry : entries_) entry.reduced = false;
  next_ = 0;
  if (!order_agreed_) agree_on_order();
  completed_.clear();
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
