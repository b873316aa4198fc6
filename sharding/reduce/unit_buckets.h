#pragma once

// See docs/glossary.md: slot, unit.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sharding/arena.h"
#include "sharding/gather/unit_slots.h"
#include "sharding/reduce/microbatch_tree.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/reduce/reduced_unit.h"
#include "tessera/dtype.h"

namespace tessera {

/// Gives units memory for gradients that wait for a reduction, and for sums that wait for an update in backward. If no
/// slot is free, a unit gets memory beyond the plan, which is counted.
///
/// Reducer owns a UnitBuckets, and the thread that runs backward calls it.
class UnitBuckets {
 public:
  /// `tree` and `counts` must outlive this object.
  UnitBuckets(const ReduceSetup& setup, const MicrobatchTree& tree, ReducerCounts& counts)
      : setup_(setup), tree_(tree), counts_(counts) {}

  /// Takes the units' memory from `buckets` and `sums`: all of it except the notes' part of `sums`
  /// (Reductions::take_memory). It is called once, before all other calls.
  void take_memory(std::vector<ReducedUnit>& units, Arena& buckets, Arena& sums);

  /// Gives a unit memory for new gradients, if it has none: a bucket, or the place of its sum.
  void open(ReducedUnit& unit);
  /// Gives a unit that is updated in backward a place for its sum.
  void place_sum(ReducedUnit& unit);
  void free_bucket(ReducedUnit::Memory& bucket) { free(bucket, buckets_); }
  void free_sum(ReducedUnit& unit) { free(unit.sum, sums_); }

  /// Returns whether the unit's gradients wait in the place of their sum.
  bool is_in_place(const ReducedUnit& unit) const;
  /// Returns the address at which a group's gradients wait: a place in the tree (MicrobatchTree::leaf_of), the place of
  /// their sum, or a place in the unit's bucket behind earlier groups.
  std::byte* of(const ReducedUnit& unit, const FlatGroup& group) const;
  /// Returns the dtype of gradients in buckets.
  DType dtype() const;

 private:
  void take_place(ReducedUnit::Memory& place, UnitSlots& slots, const Unit& unit, std::int64_t bytes);
  void take_overflow(ReducedUnit::Memory& place, const Unit& unit, std::int64_t bytes);
  void free(ReducedUnit::Memory& place, UnitSlots& slots);

  const ReduceSetup setup_;
  const MicrobatchTree& tree_;
  ReducerCounts& counts_;
  UnitSlots buckets_, sums_;
  bool warned_ = false;
};

}  // namespace tessera
