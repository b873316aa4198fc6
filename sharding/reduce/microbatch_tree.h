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

/// Joins the gradients of this rank's microbatches into the step's tree ("reproducible"): a microbatch's gradients, or
/// their sum over ranks, are a leaf, and sums join by a binary counter (SumCounter). It holds the sums that wait. Where
/// a rank's microbatches are not a subtree, BlockSums makes the sum over ranks. Without "reproducible" there is no
/// tree, and nothing waits.
///
/// Reducer owns one, and the thread that runs backward calls it.
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

  /// Says that the next microbatch belongs to another rank (Reducer::begin_backup).
  void begin_backup(std::optional<int> turn) { backup_ = turn; }

  /// Returns the place of this microbatch's sum, if its gradients are written there directly (no other sum waits
  /// there); else null.
  float* leaf_of(const FlatGroup& group) const;
  /// Returns the place for the sum of this reduction and of all sums that it joins.
  float* place_of_sum(const FlatGroup& group) const;

  /// Sums that wait, in the order in which the next one joins them.
  struct Joined {
    std::array<const float*, SumCounter::kMostJoined> sums{};
    std::size_t count = 0;
    std::span<const float* const> span() const { return {sums.data(), count}; }
  };
  Joined joined_by(const FlatGroup& group) const;

  /// Joins a leaf, which holds this rank's gradients of the microbatch, to the sums that wait. The leaf of another
  /// rank's microbatch stays in a place of its own.
  void join_leaf(const FlatGroup& group, float* leaf) const;
  /// Makes a group's sum from the sums that ranks have of the nodes of their runs; `last`: the last of this rank's
  /// sums. The sum is complete when this returns, or queued on a GPU. Returns the bytes that this rank has sent.
  /// `visitor`: null on a
  /// GPU. REQUIRES: `has_blocks`.
  std::int64_t join_blocks(const FlatGroup& group, const float* last, GradientVisitor* visitor);
  /// This is called when one more of this rank's microbatches has joined the tree.
  void end_microbatch() { round_ += backup_ ? 0 : 1; }
  /// Begins the next step's tree.
  void reset() { round_ = 0, backup_.reset(); }

 private:
  SumCounter counter() const { return blocks_ ? blocks_->counter() : SumCounter(setup_.plan.wire().accumulation); }
  float* waiting_of(const FlatGroup& group, int place) const;

  const ReduceSetup setup_;
  const SumMemory memory_;
  std::vector<float*> waiting_;      ///< [unit]: sums that wait [place, element of the unit]; null: none wait
  std::optional<BlockSums> blocks_;  ///< set if SumPlan::block_sums
  std::int32_t round_ = 0;           ///< number of this rank's microbatches that have joined the tree since `reset`
  std::optional<int> backup_;        ///< the argument of the last `begin_backup` since `reset`
};

}  // namespace tessera
