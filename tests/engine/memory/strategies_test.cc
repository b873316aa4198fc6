// Tests that every sharding strategy trains to the same bits as a run without sharding.

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/job/plan_scene.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/error.h"
#include "tests/support/pairwise.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace strategies_test {

const Placed kOneAxis[] = {ShardingStrategy::kNoShard,
                           ShardingStrategy::kShardOptimizer,
                           ShardingStrategy::kShardGradients,
                           ShardingStrategy::kShardGradOp,
                           ShardingStrategy::kFullShard,
                           Placed(ShardingStrategy::kShardOptimizer, /*shared=*/true),
                           Placed(ShardingStrategy::kFullShard, /*shared=*/true)};

struct Case {
  DType dtype;
  int ranks;
  std::int64_t accumulation;
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return std::string(name_of(info.param.dtype)) + "_ranks" + std::to_string(info.param.ranks) + "_accumulation" +
         std::to_string(info.param.accumulation);
}

class Strategies : public ::testing::TestWithParam<Case> {
 protected:
  Strategy strategy(const Placed& placed) const {
    Strategy result = tiny_strategy(placed, GetParam().dtype);
    result.gradient_accumulation = GetParam().accumulation;
    result.gradient_clipping = 0.5;
    return result;
  }
  TrainOptions options() const {
    TrainOptions result;
    result.steps = 10;
    result.batch = 36;
    return result;
  }
  /// fp32 differs only because of the order of sums. Forward and backward in bf16 and fp16 round every value to 8 or 11
  /// bits. Adam makes a full step of lr = 1e-2 in the direction of a gradient's sign, however tiny that gradient is.
  /// Ten steps can move a weight by 0.1.
  double tolerance() const { return GetParam().dtype == DType::kF32 ? 2e-3 : 6e-2; }
  double loss_tolerance() const { return GetParam().dtype == DType::kF32 ? 1e-4 : 2e-2; }
};

TEST_P(Strategies, AllGiveTheSameBitsCloseToTheUnshardedRun) {
  const ThreadRanks ranks{.ranks = GetParam().ranks};
  const Trained plain = train_plainly(strategy(ShardingStrategy::kNoShard), options());
  const Trained first = train_on_threads(ranks, strategy(ShardingStrategy::kNoShard), options());
  EXPECT_LT(largest_difference(first, plain), tolerance());
  for (std::size_t i = 0; i < plain.steps.size(); ++i) {
    EXPECT_NEAR(first.steps[i].loss, plain.steps[i].loss, loss_tolerance()) << "step " << i;
    EXPECT_NEAR(first.steps[i].grad_norm / plain.steps[i].grad_norm, 1, 10 * loss_tolerance()) << "step " << i;
    EXPECT_FALSE(first.steps[i].overflow);
  }
  EXPECT_LT(first.steps.back().loss, first.steps.front().loss);
  for (const Placed& kind : kOneAxis) {
    const Trained trained = train_on_threads(ranks, strategy(kind), options());
    expect_same_bits(trained, first, name_of(kind));
    for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << name_of(kind);
  }
  if (GetParam().ranks == 4) {
    for (const bool shared : {false, true}) {
      for (const bool world : {false, true}) {
        const Placed placed(ShardingStrategy::kHybridShard, shared);
        Strategy hybrid = strategy(placed);
        hybrid.optimizer.shard_over_world = world;
        const Trained trained = train_on_threads({.ranks = 4, .hosts = 2}, hybrid, options());
        expect_same_bits(trained, first, name_of(placed) + (world ? " over the world" : ""));
        for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << name_of(placed);
      }
    }
  }
}

// Hosts of 2 and 4 ranks hold whole shard groups of two ranks. The group of all ranks extends over unequal hosts.
TEST(UnequalHosts, StrategiesTrainToTheBitsOfOneHostInPlannedMemory) {
  TrainOptions options;
  options.steps = 3;
  options.batch = 36;
  const Trained wanted =
      train_on_threads({.ranks = 6}, tiny_strategy(ShardingStrategy::kNoShard, DType::kF32), options);
  for (const Placed& placed : {Placed(ShardingStrategy::kNoShard), Placed(ShardingStrategy::kShardOptimizer),
                               Placed(ShardingStrategy::kShardGradients), Placed(ShardingStrategy::kShardGradOp),
                               Placed(ShardingStrategy::kFullShard), Placed(ShardingStrategy::kHybridShard),
                               Placed(ShardingStrategy::kHybridShard, /*shared=*/true)}) {
    Strategy strategy = tiny_strategy(placed, DType::kF32);
    if (placed.kind == ShardingStrategy::kHybridShard) strategy.mesh.shard = 2;
    const Trained trained = train_on_threads({.ranks = 6, .ranks_of_hosts = {2, 4}}, strategy, options);
    expect_same_bits(trained, wanted, name_of(placed));
    for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << name_of(placed);
  }
}

TEST(UnequalHosts, MeshThatDoesNotFitIsRefusedWithOneThatDoes) {
  const auto refusal = [](const std::vector<int>& hosts, std::int64_t shard) -> std::string {
    Topology topology;
    topology.world_size = std::accumulate(hosts.begin(), hosts.end(), 0);
    topology.put_on_hosts(hosts);
    Strategy strategy = tiny_strategy(ShardingStrategy::kHybridShard, DType::kF32);
    strategy.mesh.shard = shard;
    try {
      mesh_shape(strategy, topology);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_NE(refusal({2, 3}, 0).find("HYBRID_SHARD makes a replica of each host"), std::string::npos);
  EXPECT_NE(refusal({2, 3}, 0).find("hint: take \"FULL_SHARD\" without \"mesh\", or start"), std::string::npos);
  EXPECT_NE(refusal({2, 4}, 0).find("or give \"mesh\": {\"shard\": 2}"), std::string::npos);
  EXPECT_NE(refusal({2, 4}, 3).find("/mesh/shard: groups of 3 ranks do not fill hosts of 2, 4"), std::string::npos);
  EXPECT_EQ(refusal({2, 4}, 2), "");
  EXPECT_EQ(refusal({2, 4}, 6), "");
  EXPECT_EQ(refusal({3, 3}, 0), "");
}

TEST(PlanScene, ReplicasThatTrainApartSumNothingOverTheReplicateAxis) {
  Topology topology;
  topology.rank = 5;
  topology.world_size = 6;
  topology.put_on_hosts({2, 2, 2});
  Strategy strategy;
  strategy.strategy = ShardingStrategy::kHybridShard;
  const MeshShape shape = mesh_shape(strategy, topology);
  const MeshPosition position = shape.position_of(topology.rank);
  const GroupAbilities abilities = planned_abilities(strategy, shape, topology);
  EXPECT_TRUE(abilities.shares_memory);
  EXPECT_FALSE(abilities.shard_reduces_in_background);
  const PlanScene together = plan_scene(strategy.sync, position, topology, abilities);
  EXPECT_EQ(together.mesh.replicate_size, 3);
  EXPECT_TRUE(together.reduces_in_background);
  EXPECT_EQ(together.shard_compressed_part, 0);
  EXPECT_EQ(together.replicate_compressed_part, 1);
  EXPECT_EQ(together.ranks_of_host, 2);
  strategy.sync.type = SyncType::kLocalSgd;
  const PlanScene apart = plan_scene(strategy.sync, position, topology, abilities);
  EXPECT_EQ(apart.mesh.replicate_size, 1);
  EXPECT_EQ(apart.replicas, 3);
  EXPECT_FALSE(apart.reduces_in_background);
  EXPECT_EQ(apart.replicate_compressed_part, 0);
}

// Threads make sums over a network while the next units are computed.
TEST(ReductionsAhead, ChangeNoBitsAndMemoryEqualsThePlan) {
  struct Run {
    ThreadRanks ranks;
    Placed placed;
  };
  const Run runs[] = {{{.ranks = 2, .hosts = 2}, ShardingStrategy::kNoShard},
                      {{.ranks = 3, .hosts = 3}, ShardingStrategy::kShardOptimizer},
                      {{.ranks = 2, .hosts = 2}, ShardingStrategy::kShardGradients},
                      {{.ranks = 3, .hosts = 3}, ShardingStrategy::kFullShard},
                      {{.ranks = 4, .hosts = 2}, ShardingStrategy::kFullShard},  // sums inside hosts, then across them
                      {{.ranks = 4, .hosts = 2}, ShardingStrategy::kHybridShard},
                      {{.ranks = 4, .hosts = 2}, Placed(ShardingStrategy::kHybridShard, /*shared=*/true)},
                      {{.ranks = 2}, ShardingStrategy::kFullShard}};
  TrainOptions options;
  options.steps = 4;
  options.batch = 24;
  struct How {
    const char* name;
    std::optional<std::int64_t> ahead;
    bool in_backward = false;
  };
  const How hows[] = {{"as planned", {}}, {"1 ahead", 1}, {"3 ahead", 3}, {"16 ahead", 16}, {"in backward", {}, true}};
  const auto exists = [](const Run&, std::int64_t accumulation, const How& how) {
    return !how.in_backward || accumulation == 1;
  };
  constexpr std::int64_t kAccumulations[] = {1, 2};
  MadeOnce<Trained> none_ahead;
  for (const auto& each : pairwise_where(exists, runs, kAccumulations, hows)) {
    const Run& run = std::get<0>(each);
    const std::int64_t accumulation = std::get<1>(each);
    const How& how = std::get<2>(each);
    const auto train = [&](std::optional<std::int64_t> ahead, bool in_backward) {
      Strategy strategy = tiny_strategy(run.placed, DType::kF32);
      strategy.gradient_accumulation = accumulation;
      strategy.reductions_ahead = ahead;
      strategy.optimizer.in_backward = in_backward;
      return train_on_threads(run.ranks, strategy, options);
    };
    const std::string of = name_of(run.placed) + ", " + std::to_string(run.ranks.ranks) + " ranks on " +
                           std::to_string(run.ranks.hosts) + " hosts, " + std::to_string(accumulation) +
                           " microbatches";
    const std::string what = of + ", " + how.name;
    const Trained& wanted = none_ahead(of, [&] { return train(0, false); });
    const Trained trained = train(how.ahead, how.in_backward);
    expect_same_bits(trained, wanted, what);
    for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << what;
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  constexpr std::int64_t kAccumulations[] = {1, 3};
  for (const auto& [dtype, ranks, accumulation] : pairwise_of(kDTypes, std::array{1, 2, 3, 4}, kAccumulations)) {
    cases.push_back({dtype, ranks, accumulation});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, Strategies, ::testing::ValuesIn(all_cases()), name_of_case);

}  // namespace strategies_test
}  // namespace tessera::testing
