#include "sharding/reducer.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "sharding/dtype.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

at::Tensor tensor_at(std::byte* memory, DType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::from_blob(memory, sizes, strides, at::TensorOptions(scalar_type_of(dtype)));
}

/// Narrows `numel` fp32 in place into `dtype` at the front of the same memory. Writing never overtakes reading, since an
/// element of `dtype` is at most as long.
void narrow_in_place(std::byte* memory, DType dtype, std::int64_t numel) {
  constexpr std::int64_t kChunk = 1 << 16;
  const auto from_type = at::TensorOptions(at::kFloat), to_type = at::TensorOptions(scalar_type_of(dtype));
  for (std::int64_t begin = 0; begin < numel; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, numel - begin);
    const at::Tensor narrowed = at::from_blob(memory + begin * 4, {count}, from_type).to(to_type.dtype());
    std::memcpy(memory + begin * static_cast<std::int64_t>(size_of(dtype)), narrowed.const_data_ptr(), narrowed.nbytes());
  }
}

}  // namespace

Reducer::Reducer(const MemoryPlan& plan, std::vector<Unit*> units, const MeshAxes& axes, Arena buckets, Arena scratch)
    : plan_(plan), axes_(axes), buckets_(std::move(buckets)), scratch_(std::move(scratch)) {
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
    if (plan_.bucket_mode() == BucketMode::kAccumulator) entry.bucket = buckets_.take(plan_.bucket_bytes_of(unit->shape()));
  }
  if (plan_.bucket_mode() == BucketMode::kShared) {
    root_bucket_ = buckets_.take(plan_.bucket_bytes_of(units[0]->shape()));
    for (std::int64_t i = 0; i < plan_.shared_buckets(); ++i) shared_buckets_.push_back(buckets_.take(plan_.bucket_bytes()));
    bucket_taken_.resize(shared_buckets_.size());
  }
  buckets_.expect_full();
  scratch_numel_ = plan_.scratch_numel();
  scratch_memory_ = reinterpret_cast<float*>(scratch_.take(scratch_numel_ * 4));
  scratch_.expect_full();
}

DType Reducer::bucket_dtype() const {
  return plan_.bucket_mode() == BucketMode::kShared ? plan_.input().reduce : DType::kF32;
}

void Reducer::take(FlatGroup& group, std::size_t parameter) {
  const Unrecorded unrecorded;
  Entry& entry = this->entry(*group.unit);
  at::Tensor& gradient = group.parameters[parameter].tensor.mutable_grad();
  const bool was_ready = entry.phase == Phase::kReady;  // and one more gradient comes: it is added
  if (entry.phase == Phase::kIdle) open(entry);
  store(entry, group, parameter, gradient);
  gradient.reset();
  const bool complete = entry.arrived_count == entry.expected && plan_.bucket_mode() == BucketMode::kShared;
  if (!complete || was_ready) return;
  entry.phase = Phase::kReady;
  if (entry.reduced) return;  // a late gradient: reduced once more when the round ends
  completed_.push_back(entry.unit->index);
  launch_ready();
}

void Reducer::open(Entry& entry) {
  entry.phase = Phase::kFilling;
  if (plan_.bucket_mode() != BucketMode::kShared) return;  // memory of its own, and arrivals last until reset
  entry.arrived_count = 0;
  for (auto& group : entry.arrived) std::fill(group.begin(), group.end(), 0);
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
  ++counts_.overflow_buckets;
  entry.overflow = Arena::plain("overflow bucket", plan_.bucket_bytes_of(entry.unit->shape()));
  counts_.overflow_bytes += entry.overflow.bytes();
  entry.bucket = entry.overflow.take(entry.overflow.bytes());
}

void Reducer::close(Entry& entry) {
  entry.phase = Phase::kIdle;
  if (plan_.bucket_mode() != BucketMode::kShared) return;
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
  const at::Tensor place = tensor_at(bucket_of(entry, group) + offset, dtype, flat.sizes, flat.strides);
  char& arrived = entry.arrived[group.index][parameter];
  if (arrived) {
    place.add_(gradient);
  } else {
    place.copy_(gradient);
    arrived = 1;
    ++entry.arrived_count;
  }
  entry.used[group.index][parameter] = 1;
}

std::byte* Reducer::bucket_of(const Entry& entry, const FlatGroup& group) const {
  if (plan_.bucket_mode() == BucketMode::kInPlace) return reinterpret_cast<std::byte*>(group.gradient);
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
  for (auto& group : entry.unit->groups) {
    if (!group->trainable) continue;
    fill_missing(entry, *group);
    const auto begin = std::chrono::steady_clock::now();
    reduce_group(entry, *group);
    counts_.reduction_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
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
  const bool narrows = placement.replicate && mesh.replicate_size > 1;
  float* sum = entry.has_sum || narrows ? scratch(first_numel) : group.gradient;
  Work over_shard = placement.shard ? axes_.reduce->reduce_scatter(name, bucket, wire, sum, first_numel)
                                    : axes_.reduce->all_reduce(name, bucket, wire, sum, first_numel);
  throw_if_error(over_shard.wait());
  float* part = sum;
  if (mesh.replicate_size > 1) {
    if (narrows) part = entry.has_sum ? sum + group.gradient_part.offset % first_numel : group.gradient;
    Work over_replicas =
        narrows ? axes_.replicate->reduce_scatter(name, sum, DType::kF32, part, group.gradient_part.numel)
                : axes_.replicate->all_reduce(name, sum, DType::kF32, sum, first_numel);
    throw_if_error(over_replicas.wait());
  }
  if (part == group.gradient) return;
  at::from_blob(group.gradient, {group.gradient_part.numel}, at::kFloat)
      .add_(at::from_blob(part, {group.gradient_part.numel}, at::kFloat));
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
  const Unrecorded unrecorded;
  if (plan_.bucket_mode() != BucketMode::kShared) {
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
