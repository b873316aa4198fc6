// Counts the collectives of a step.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/limits/patience.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace traffic_test {

// FULL_SHARD has U block units, S = min(prefetch + 1, U) shared slots, and one slot that belongs to the root.
//
// Forward reads root, 0, 1, ..., U-1, root. The root is gathered once and stays, and each block is gathered once. When
// backward begins, the slots hold the last S blocks, which backward reads first (a slot is taken from the unit that is
// needed last). The other U - S blocks are gathered again. Prefetching begins the same gathers earlier and never adds
// gathers. It may release only units that are needed later than the prefetched unit. The first microbatch of a step
// therefore makes 1 + U + (U - S) gathers. Values stay valid until the step. The next microbatch therefore begins with
// the root and blocks 0..S-1 in place, and makes U - S gathers in each direction. SHARD_GRAD_OP gathers all 1 + U units
// once in each step. Ranks that share one copy make no gathers. Each microbatch reduces each of the 1 + U units once.
TEST(Traffic, CountedCollectivesEqualThePlan) {
  const auto expect_counts = [](const Mesh& mesh, Strategy strategy, std::int64_t blocks) {
    Session session(mesh, strategy, {.blocks = blocks});
    const std::int64_t microbatches = strategy.gradient_accumulation;
    const std::int64_t slots = std::min(strategy.prefetch + 1, blocks);
    std::int64_t gathers = 1 + blocks + (blocks - slots) + (microbatches - 1) * 2 * (blocks - slots);
    if (strategy.strategy == ShardingStrategy::kShardGradOp) gathers = 1 + blocks;
    if (mesh.world_size() == 1 || strategy.host_sharing) gathers = 0;
    for (int step = 0; step < 4; ++step) {
      const TrafficCounts before = session.engine.traffic();
      for (std::int64_t i = 0; i < microbatches; ++i) session.engine.backward(session.loss(i));
      const StepResult result = session.engine.step();
      const TrafficCounts after = session.engine.traffic();
      EXPECT_EQ(result.planned, result.allocated);
      EXPECT_EQ(after.gathers - before.gathers, gathers) << "step " << step;
      EXPECT_EQ(after.reductions - before.reductions, microbatches * (1 + blocks)) << "step " << step;
      EXPECT_EQ(after.overflow_slots, 0) << "step " << step;
      // The schedule is known from the second step on. All units except the very first are then gathered before they
      // are used.
      const std::int64_t early = gathers > 0 && strategy.prefetch > 0 ? gathers - 1 : 0;
      if (step == 0) continue;
      EXPECT_EQ(after.prefetched_gathers - before.prefetched_gathers, early) << "step " << step;
      EXPECT_EQ(after.overflow_buckets, before.overflow_buckets) << "step " << step;
    }
  };
  for (int ranks : {1, 2, 3}) {
    for (const Placed& kind : {Placed(ShardingStrategy::kShardGradOp), Placed(ShardingStrategy::kFullShard),
                               Placed(ShardingStrategy::kFullShard, /*shared=*/true)}) {
      for (std::int64_t prefetch : {0, 1, 2, 5}) {
        for (std::int64_t accumulation : {1, 2}) {
          SCOPED_TRACE(name_of(kind) + ", " + std::to_string(ranks) + " ranks, prefetch " + std::to_string(prefetch) +
                       ", accumulation " + std::to_string(accumulation));
          Strategy strategy = strategy_for(kind);
          strategy.prefetch = prefetch;
          strategy.gradient_accumulation = accumulation;
          run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { expect_counts(mesh, strategy, 4); });
        }
      }
    }
  }
}

TEST(Traffic, PrefetchBytesCountAsTheLargestUnitsThatFit) {
  constexpr std::int64_t kBlocks = 5;
  const auto with = [&](std::int64_t prefetch, std::int64_t bytes) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.prefetch = prefetch;
    strategy.prefetch_bytes = bytes;
    MemoryUse use;
    TrafficCounts traffic;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, {.blocks = kBlocks});
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      if (mesh.rank() == 0) use = session.engine.plan().use, traffic = session.engine.traffic();
    });
    return std::pair(use[MemoryCategory::kSlots], traffic.prefetched_gathers);
  };
  const std::int64_t block = with(2, 0).first - with(1, 0).first;
  ASSERT_GT(block, 0);
  EXPECT_EQ(with(1, 1), with(1, 0));
  EXPECT_EQ(with(1, 2 * block - 1), with(1, 0));
  EXPECT_EQ(with(1, 2 * block), with(2, 0));
  EXPECT_EQ(with(1, std::int64_t{1} << 60), with(kBlocks, 0));
}

// Backward completes the last block first. A rank that has not begun backward makes the other rank wait for a reduction
// only if the other rank is SumPlan::reduction_lag units ahead.
TEST(Traffic, RankMayRunAheadByThePlansLag) {
  for (const Placed& kind : {Placed(ShardingStrategy::kNoShard), Placed(ShardingStrategy::kShardGradients),
                             Placed(ShardingStrategy::kFullShard, /*shared=*/true)}) {
    SCOPED_TRACE(name_of(kind));
    constexpr std::int64_t kBlocks = 9;
    std::atomic<bool> ahead = false;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(kind), {.blocks = kBlocks});
      const std::int64_t lag = kind.kind == ShardingStrategy::kNoShard ? 7 : 3;
      const auto on_gradient_of = [&](std::int64_t block, const std::function<void()>& act) {
        const auto parameters = session.model->blocks[static_cast<std::size_t>(block)]->parameters();
        parameters[0].register_hook([act](const at::Tensor&) { act(); });
      };
      if (mesh.rank() == 0) on_gradient_of(kBlocks - 1 - lag, [&] { ahead = true; });
      if (mesh.rank() == 1) {
        on_gradient_of(kBlocks - 1, [&] {
          for (Deadline limit(std::chrono::seconds(10)); !ahead && !limit.passed();) std::this_thread::yield();
          EXPECT_TRUE(ahead);
        });
      }
      session.train(0);
    });
  }
}

}  // namespace traffic_test
}  // namespace tessera::testing
