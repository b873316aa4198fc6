#include "sharding/reduce/unit_buckets.h"

#include "runtime/base/log.h"
#include "sharding/reduce/gradient_place.h"

namespace tessera {

void UnitBuckets::take_memory(std::vector<ReducedUnit>& units, Arena& buckets, Arena& sums) {
  const MemoryPlan& plan = setup_.plan;
  for (ReducedUnit& unit : units) {
    const UnitShape shape = unit.unit->shape();
    unit.bucket_bytes = plan.bucket_bytes_of(shape);
    unit.sum_bytes = plan.sum_bytes_of(shape);
    if (plan.sums().bucket_mode == BucketMode::kAccumulator) unit.bucket.memory = buckets.take(unit.bucket_bytes);
  }
  const ReducedUnit& root = units[0];
  if (plan.sums().bucket_mode == BucketMode::kShared)
    buckets_ = UnitSlots(buckets, root.bucket_bytes, plan.sums().shared_buckets, plan.sums().bucket_bytes);
  if (setup_.updates_in_backward())
    sums_ = UnitSlots(sums, root.sum_bytes, plan.sums().shared_sums, plan.sums().sum_bytes);
}

DType UnitBuckets::dtype() const {
  return setup_.plan.sums().bucket_mode == BucketMode::kShared ? setup_.plan.bucket_dtype() : DType::kF32;
}

void UnitBuckets::open(ReducedUnit& unit) {
  if (setup_.plan.sums().bucket_mode == BucketMode::kShared) {
    take_place(unit.bucket, buckets_, *unit.unit, unit.bucket_bytes);
  } else if (setup_.updates_in_backward()) {
    place_sum(unit);
  } else if (unit.has_sum) {  // the sum lies in its own place, so the new gradients need other memory
    take_overflow(unit.bucket, *unit.unit, unit.bucket_bytes);
  }
}

void UnitBuckets::place_sum(ReducedUnit& unit) {
  take_place(unit.sum, sums_, *unit.unit, unit.sum_bytes);
  place_gradients(*unit.unit, unit.sum.memory);
}

/// Gives `place` one of `slots`, or memory beyond the plan.
void UnitBuckets::take_place(ReducedUnit::Memory& place, UnitSlots& slots, const Unit& unit, std::int64_t bytes) {
  place.slot = slots.take(/*for_root=*/unit.index == 0);
  if (place.slot == UnitSlots::kNone) return take_overflow(place, unit, bytes);
  place.memory = slots.memory(place.slot);
}

void UnitBuckets::take_overflow(ReducedUnit::Memory& place, const Unit& unit, std::int64_t bytes) {
  ++counts_.overflow_buckets;
  if (!warned_) {
    warned_ = true;
    log_warning("unit " + unit.name +
                ": gradients came in another order than before, so a bucket beyond the plan is used (the step's "
                "allocated memory "
                "shows it). That is expected in a step in which other parameters are used than in the step before");
  }
  place.overflow = Arena::plain("overflow bucket", bytes, setup_.device.device);
  counts_.hold(place.overflow.bytes());
  place.memory = place.overflow.take(place.overflow.bytes());
}

void UnitBuckets::free(ReducedUnit::Memory& place, UnitSlots& slots) {
  if (place.slot != UnitSlots::kNone) slots.give_back(place.slot);
  counts_.hold(-place.overflow.bytes());
  place = {};
}

bool UnitBuckets::is_in_place(const ReducedUnit& unit) const {
  return setup_.plan.sums().bucket_mode == BucketMode::kInPlace && unit.bucket.overflow.bytes() == 0;
}

std::byte* UnitBuckets::of(const ReducedUnit& unit, const FlatGroup& group) const {
  if (float* const leaf = tree_.leaf_of(group)) return reinterpret_cast<std::byte*>(leaf);
  if (is_in_place(unit)) return reinterpret_cast<std::byte*>(group.gradient);
  std::byte* bucket = unit.bucket.memory;
  for (std::size_t i = 0; i < group.index; ++i) {
    const FlatGroup& before = *unit.unit->groups[i];
    if (before.trainable) bucket += before.layout.numel() * size_of(dtype());
  }
  return bucket;
}

}  // namespace tessera
