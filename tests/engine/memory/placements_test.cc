// Tests that training under every legal placement of a 2 x 2 mesh gives the same bits as under NO_SHARD, and uses the
// planned memory.

#include <gtest/gtest.h>

#include <string>

#include "engine/detailed_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/config/placement_rows.h"
#include "tessera/checkpoint.h"
#include "tests/support/legal_placements.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace placements_test {

constexpr int kRanks = 4;

Strategy placed_by_axes(const PlacementConfig& placement, bool shared, DType dtype = DType::kF32) {
  Strategy strategy = tiny_strategy(Placed(ShardingStrategy::kFullShard, shared), dtype);
  strategy.gradient_clipping = 0.5;
  strategy.placement = placement;
  return strategy;
}

Strategy unsharded(DType dtype = DType::kF32) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kNoShard, dtype);
  strategy.gradient_clipping = 0.5;
  return strategy;
}

void expect_planned_memory(const Trained& trained, const std::string& what) {
  for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << what;
}

TEST(Placements, EveryLegalOneHasTheBitsOfNoShard) {
  TrainOptions options;
  options.steps = 3;
  options.batch = 24;
  const auto with_microbatches = [](Strategy strategy) {
    strategy.gradient_accumulation = 2;
    return strategy;
  };
  // There is no "mesh", so its axes follow from the hosts: two hosts of two ranks.
  const ThreadRanks ranks{.ranks = kRanks, .hosts = 2};
  const Trained wanted = train_on_threads(ranks, with_microbatches(unsharded()), options);
  for (const PlacementConfig& placement : legal_placements()) {
    for (const bool shared : {false, true}) {
      const Strategy strategy = with_microbatches(placed_by_axes(placement, shared));
      const std::string what = describe_placement(strategy) + (shared ? ", shared" : "");
      const Trained trained = train_on_threads(ranks, strategy, options);
      expect_same_bits(trained, wanted, what);
      expect_planned_memory(trained, what);
    }
  }
}

TEST(Placements, EveryLegalOneHasTheBitsOfNoShardInBackwardAndInBf16) {
  TrainOptions options;
  options.steps = 3;
  options.batch = 24;
  const ThreadRanks ranks{.ranks = kRanks};
  const auto in_backward = [](Strategy strategy) {
    update_in_backward(strategy);
    strategy.mixed_precision.reduce = DType::kBF16;
    return strategy;
  };
  const Trained wanted = train_on_threads(ranks, in_backward(unsharded(DType::kBF16)), options);
  for (const PlacementConfig& placement : legal_placements()) {
    Strategy strategy = in_backward(placed_by_axes(placement, /*shared=*/false, DType::kBF16));
    strategy.mesh.host = 2;
    strategy.mesh.rank = 2;
    const std::string what = describe_placement(strategy);
    const Trained trained = train_on_threads(ranks, strategy, options);
    expect_same_bits(trained, wanted, what);
    expect_planned_memory(trained, what);
  }
}

TEST(Placements, MuonHasTheBitsOfNoShardUnderEveryLegalOne) {
  TrainOptions options;
  options.steps = 2;
  options.batch = 24;
  const ThreadRanks ranks{.ranks = kRanks, .hosts = 2};
  const auto with_muon = [](Strategy strategy) {
    strategy.optimizer.type = OptimizerType::kMuon;
    return strategy;
  };
  const Trained wanted = train_on_threads(ranks, with_muon(unsharded()), options);
  for (const PlacementConfig& placement : legal_placements()) {
    const Strategy strategy = with_muon(placed_by_axes(placement, /*shared=*/false));
    const Trained trained = train_on_threads(ranks, strategy, options);
    expect_same_bits(trained, wanted, describe_placement(strategy));
    expect_planned_memory(trained, describe_placement(strategy));
  }
}

TEST(Placements, PlanWithoutRanksEqualsTheEnginesPlan) {
  Topology topology;
  topology.world_size = kRanks;
  topology.local_world_size = 2;
  topology.launcher = "thread";
  for (const PlacementConfig& placement : legal_placements()) {
    const Strategy strategy = placed_by_axes(placement, /*shared=*/false);
    Tiny shapes = make_tiny({}, true);
    const MemoryPlan planned = plan_in_detail(*shapes, strategy, topology);
    run_ranks({.ranks = kRanks, .hosts = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      EXPECT_EQ(session.engine.plan().use.bytes, planned.use().bytes) << describe_placement(strategy);
    });
  }
}

// The order in which the axes cut the elements decides which rank writes which elements.
TEST(Placements, CheckpointOfEveryLegalOneGoesOnUnderNoShard) {
  const ThreadRanks ranks{.ranks = kRanks, .hosts = 2};
  const Values wanted = of_rank_zero(ranks, [&](const Mesh& mesh) { return trained(mesh, unsharded(), 3); });
  for (const PlacementConfig& placement : legal_placements()) {
    const Strategy strategy = placed_by_axes(placement, /*shared=*/false);
    const TestFolder folder;
    run_ranks(ranks, [&](const Mesh& mesh) {
      {
        Session first(mesh, strategy);
        for (std::size_t i = 0; i < 2; ++i) first.train(i);
        save_checkpoint(first.engine, folder.path());
      }
      Session second(mesh, unsharded());
      load_checkpoint(second.engine, folder.path());
      second.train(2);
      EXPECT_TRUE(all_same_bits(second.values(), wanted)) << describe_placement(strategy);
    });
  }
}

}  // namespace placements_test
}  // namespace tessera::testing
