// Tests which part of a buffer each rank owns.

#include "sharding/layout/placement.h"

#include <gtest/gtest.h>

#include <numeric>

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
