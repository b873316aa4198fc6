// Tests which part of a buffer each rank owns.

#include "sharding/layout/placement.h"

#include <gtest/gtest.h>

#include <vector>

#include "runtime/config/placement_rows.h"
#include "tests/support/legal_placements.h"

namespace tessera {
namespace {

constexpr ShardingStrategy kAll[] = {ShardingStrategy::kNoShard,        ShardingStrategy::kShardOptimizer,
                                     ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp,
                                     ShardingStrategy::kFullShard,      ShardingStrategy::kHybridShard};

bool inside(Extent inner, Extent outer) { return inner.offset >= outer.offset && inner.end() <= outer.end(); }

TEST(Placement, OptimizerPartLiesInsideGradientPart) {
  for (ShardingStrategy strategy : kAll) {
    for (bool world : {false, true}) {
      const Placement placement = placement_of(strategy, world);
      for (int r = 0; r < 2; ++r) {
        for (int s = 0; s < 3; ++s) {
          const MeshPosition mesh{2, 3, r, s};
          const std::int64_t numel = parts_of(placement, mesh) * 256;
          EXPECT_TRUE(inside(owned(placement.optimizer, mesh, numel), owned(placement.gradients, mesh, numel)));
          if (placement.parameters.shard) {
            EXPECT_TRUE(inside(owned(placement.gradients, mesh, numel), owned(placement.parameters, mesh, numel)));
          }
        }
      }
    }
  }
}

TEST(Placement, PartsOfEveryLegalPlacementLieInsideEachOther) {
  ASSERT_EQ(testing::legal_placements().size(), 12u);
  for (const PlacementConfig& axes : testing::legal_placements()) {
    const Strategy strategy = testing::strategy_placed_as(axes);
    const Placement placement = placement_of(strategy);
    for (int rank = 0; rank < 6; ++rank) {
      const MeshPosition mesh = MeshPosition{2, 3}.of(rank);
      const std::int64_t numel = parts_of(placement, mesh) * 256;
      const Extent optimizer = owned(placement.optimizer, mesh, numel),
                   gradients = owned(placement.gradients, mesh, numel);
      EXPECT_TRUE(inside(optimizer, gradients)) << describe_placement(strategy) << ", rank " << rank;
      EXPECT_TRUE(inside(gradients, owned(placement.parameters, mesh, numel))) << describe_placement(strategy);
      EXPECT_EQ(optimizer.offset % 256, 0) << describe_placement(strategy);
    }
  }
}

TEST(Placement, PartsOfTheReplicateAxisFirstCoverTheBufferOnce) {
  constexpr AxisPlacement kAxes{.shard = true, .replicate = true, .replicate_first = true};
  std::vector<std::int64_t> offsets;
  for (int rank = 0; rank < 6; ++rank) offsets.push_back(owned(kAxes, MeshPosition{2, 3}.of(rank), 12).offset);
  EXPECT_EQ(offsets, (std::vector<std::int64_t>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(owned(kAxes, MeshPosition{2, 3}.of(4), 12).numel, 2);
}

TEST(Placement, CopyOfAHostIsNotSharedWhereReplicasCutFirst) {
  const Strategy strategy =
      testing::strategy_placed_as({CutAxes{}, CutAxes{.host = true}, CutAxes{.host = true, .rank = true}});
  EXPECT_FALSE(share_parameters(placement_of(strategy)).shared);
  const Strategy other = testing::strategy_placed_as({CutAxes{}, CutAxes{}, CutAxes{.host = true, .rank = true}});
  EXPECT_TRUE(share_parameters(placement_of(other)).shared);
}

TEST(Placement, PartsCoverTheBufferOncePerReplica) {
  for (bool shard : {false, true}) {
    for (bool replicate : {false, true}) {
      if (replicate && !shard) continue;
      std::vector<int> hits(2 * 3 * 8);
      for (int r = 0; r < 2; ++r) {
        for (int s = 0; s < 3; ++s) {
          const Extent part = owned({shard, replicate}, {2, 3, r, s}, static_cast<std::int64_t>(hits.size()));
          for (std::int64_t i = part.offset; i < part.end(); ++i) ++hits[i];
        }
      }
      const int copies = (shard ? 1 : 3) * (replicate ? 1 : 2);
      EXPECT_TRUE(std::all_of(hits.begin(), hits.end(), [&](int n) { return n == copies; }));
    }
  }
}

}  // namespace
}  // namespace tessera
