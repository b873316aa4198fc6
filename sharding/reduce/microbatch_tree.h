#pragma once

// See docs/glossary.md: unit.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sharding/arena.h"
#include "sharding/layout/plan/sum_counter.h"
#include "sharding/reduce/block_sums.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/reduce/sum_memory.h"
#include "sharding/unit.h"

namespace tessera {

/// Adds up the gradients of this rank's microbatches in the step's tree ("reproducible"). A microbatch's gradients, or
/// their sum over ranks, are a leaf of the tree, and sums are joined by a binary counter (SumCounter). This object
/// holds the sums that wait for other sums. If a rank's microbatches are not a subtree, BlockSums makes the sum over
/// ranks. If "reproducible" is off, there is no tree, and no sum waits.
///
/// Reducer owns a MicrobatchTree, and the thread that runs backward calls it.
class MicrobatchTree {
 public:
  explicit MicrobatchTree(const ReduceSetup& setup) : setup_(setup), memory_(setup.device) {}
  /// Takes the memory of waiting sums from `scratch`. It is called once, before all other calls.
  void take_memory(const std::vector<Unit*>& units, Arena& scratch);

  /// Returns whether ranks' sums are joined by `join_blocks`.
  bool has_blocks() const { return blocks_.has_value(); }
  /// Gives ranks the runs of `order` from the next step on (Reducer::deal).
  void deal(const MicrobatchOrder& order) {
    if (blocks_) blocks_->deal(order);
  }

  /// It is called if the next microbatch belongs to another rank (Reducer::begin_backup).
  void begin_backup(std::optional<int> turn) { backup_ = turn; }

  /// Returns the place of this microbatch's sum, if the gradients may be written there directly because no other sum
  /// waits there; else null.
  float* leaf_of(const FlatGroup& group) const;
  /// Returns the place for the sum of this reduction and of all sums that it joins.
  float* place_of_sum(const FlatGroup& group) const;

  /// The sums that wait, in the order in which the next sum is added to them.
  struct Joined {
    std::array<const float*, SumCounter::kMostJoined> sums{};
    std::size_t count = 0;
    std::span<const float* const> span() const { return {sums.data(), count}; }
  };
  Joined joined_by(const FlatGroup& group) const;

  /// Adds a leaf, which holds this rank's gradients of the microbatch, to the sums that wait. The leaf of another
  /// rank's microbatch stays in a separate place.
  void join_leaf(const FlatGroup& group, float* leaf) const;
  /// Makes a group's sum from the sums that ranks have for the nodes of their runs. `last` is the last of this rank's
  /// sums. `visitor` is null on a GPU. When this function returns, the sum is complete, or queued on a GPU. Returns the
  /// bytes that this rank has sent. REQUIRES: `has_blocks`.
  std::int64_t join_blocks(const FlatGroup& group, const float* last, GradientVisitor* visitor);
  /// It is called when one more of this rank's microbatches has joined the tree.
  void end_microbatch() { round_ += backup_ ? 0 : 1; }
  /// Begins the next step's tree.
  void reset() { round_ = 0, backup_.reset(); }

 private:
  SumCounter counter() const { return blocks_ ? blocks_->counter() : SumCounter(setup_.plan.wire().accumulation); }
  float* waiting_of(const FlatGroup& group, int place) const;

  const ReduceSetup setup_;
  const SumMemory memory_;
  std::vector<float*> waiting_;      ///< [unit]: sums that wait [place, element of the unit]; null if no sum waits
  std::optional<BlockSums> blocks_;  ///< set if SumPlan::block_sums
  std::int32_t round_ = 0;           ///< number of this rank's microbatches that have joined the tree since `reset`
  std::optional<int> backup_;        ///< the argument of the last `begin_backup` since `reset`
};

}  // namespace tessera
