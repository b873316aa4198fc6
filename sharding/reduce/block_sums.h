#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/layout/layout.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/layout/plan/sum_counter.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/reduce/sum_memory.h"
#include "sharding/unit.h"

namespace tessera {

/// Joins the sums of ranks whose runs of microbatches are not whole subtrees ("reproducible" with last_microbatch,
/// cuts_subtrees). The sum over all ranks then equals the sum of the tree over all microbatches, bit for bit.
///
/// A rank's run consists of nodes of the tree (blocks_of), and the rank has the sum of each node. Every rank gets its
/// piece of all these sums by an all-to-all, and adds them in the order of the tree. If gradients are cut over all
/// ranks, this piece is the part of the gradients that the rank keeps. Otherwise ranks share the work, and an
/// all-gather follows. The exchange is made piece by piece (SumPlan::block_piece_numel), so that it needs little
/// memory.
///
/// Reducer owns a BlockSums, and calls it in `finish`. All ranks make the same calls. Errors of transports are thrown
/// as tessera::Error.
class BlockSums {
 public:
  /// `world` has all ranks. `world` and `plan` must outlive this object. `memory` has MemoryPlan::block_exchange_numel
  /// elements of `device`. On a GPU all work is queued.
  BlockSums(const MemoryPlan& plan, Collectives& world, float* memory, ComputeDevice device);

  /// Gives ranks the runs of `order` from the next step on; no run is longer than the plan's longest run. It is also
  /// called before `join`, to tell which microbatches other ranks have completed in this step.
  void deal(const MicrobatchOrder& order);
  /// Returns the counter of this rank's run.
  SumCounter counter() const { return {order_.run_of(world_.rank()), order_.all()}; }
  /// Returns the number of nodes in the part of this rank's run that no other rank has completed.
  int own_blocks() const { return static_cast<int>(blocks_of(order_.kept_of(world_.rank()), order_.all()).size()); }
  /// Returns whether no other rank has completed the end of this rank's run. The run's last sum is then in the memory
  /// of its last leaf.
  bool has_whole_run() const { return order_.kept_of(world_.rank()) == order_.run_of(world_.rank()); }
  /// Returns the number of other ranks' microbatches that this rank has completed, so that it contributes their
  /// gradients.
  int made_again() const {
    return static_cast<int>(std::ranges::count(order_.made_again, world_.rank(), &MadeAgain::rank));
  }
  /// Computes `group.gradient` from the sums of whole gradients that ranks have, and passes it to `visitor`, which is
  /// null on a GPU. `own` has the sums of this rank's nodes, in order, followed by the leaves of other ranks'
  /// microbatches that this rank has completed, in the order of completion. Any one of them may lie in
  /// `group.gradient`.
  void join(const FlatGroup& group, std::span<const float* const> own, GradientVisitor* visitor);
  /// Returns the bytes that this rank has sent so far.
  std::int64_t sent_bytes() const { return sent_bytes_; }

 private:
  /// A node of the tree whose sum this rank receives, and the index of this sum among all received sums.
  struct Arrival {
    TreeBlock block;
    std::int64_t place = 0;
  };
  void join_own_part(const FlatGroup& group, std::span<const float* const> own, GradientVisitor* visitor);
  void join_shares(const FlatGroup& group, std::span<const float* const> own);
  /// The pieces that ranks get. Each piece has `numel` elements. The piece of rank 0 begins at `begin`, and the piece
  /// of each further rank begins `stride` elements later. Elements at `end` and behind it count as zeros.
  struct Pieces {
    std::int64_t begin, stride, numel, end;
  };
  /// Sends each rank its piece of `own`, and gets this rank's piece of all ranks' sums.
  void exchange(std::string_view label, std::span<const float* const> own, const Pieces& pieces);
  /// Adds the received sums, `numel` elements of each, in the order of the tree.
  const float* joined(std::int64_t numel);
  float* sum_of(TreeBlock node, std::size_t& next, std::int64_t numel);

  const MemoryPlan& plan_;
  Collectives& world_;
  const SumMemory memory_;
  QueueClock* const waits_;  ///< ComputeDevice::waits
  MicrobatchOrder order_;
  float *sent_, *received_, *gathered_;
  std::vector<Arrival> arrivals_;  ///< the received sums, in the order of their microbatches
  std::int64_t sent_bytes_ = 0;
};

}  // namespace tessera
