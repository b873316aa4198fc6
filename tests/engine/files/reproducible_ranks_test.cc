// Tests "reproducible" where ranks are processes that Gloo joins, with microbatches of unequal weights, with overflows,
// and with runs that are dealt. Also counts what ranks send.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/detailed_plan.h"
#include "tests/engine/files/reproducible_runs.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/pairwise.h"
#include "tests/support/stand_ins/counted_collectives.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace reproducible_test {

/// Ranks that are processes, and the transport that joins them.
struct JoinedWorld {
  World world;
  TransportChoice transport;
};

/// A run of the grid over processes, and the run of one rank with which it is compared.
struct ProcessCase {
  Strategy strategy;
  const TrainedStates* wanted;
  std::string what;
};

// Gloo joins ranks of several hosts, or all ranks. The tests of reproducible_test.cc only simulate hosts.
TEST(ReproducibleOverGloo, ProcessesGiveTheBitsAndOptimizerStatesOfOneRank) {
  at::set_num_threads(1);
  constexpr TransportChoice kAuto = TransportChoice::kAuto, kGloo = TransportChoice::kGloo;
  const JoinedWorld worlds[] = {
      {{4, 2, 8}, kAuto}, {{4, 2, 12}, kAuto}, {{3, 3, 12}, kAuto}, {{4, 1, 8}, kGloo}, {{3, 1, 24}, kGloo}};
  const Placed placements[] = {ShardingStrategy::kFullShard,
                               ShardingStrategy::kHybridShard,
                               Placed(ShardingStrategy::kHybridShard, /*shared=*/true),
                               ShardingStrategy::kShardGradients,
                               ShardingStrategy::kShardGradOp,
                               ShardingStrategy::kNoShard,
                               ShardingStrategy::kShardOptimizer};
  const auto exists = [](const JoinedWorld& joined, const Rule&, const Placed& placed, DType, GradientSync sync) {
    const bool has_replicas = joined.world.ranks > joined.world.hosts && joined.world.hosts > 1;
    return goes(joined.world, sync) && (placed.kind != ShardingStrategy::kHybridShard || has_replicas);
  };
  const TestFolder folder;
  MadeOnce<TrainedStates> alone;
  for (const JoinedWorld& joined : worlds) {
    const World& world = joined.world;
    std::vector<ProcessCase> cases;
    // This grid has all pairs of a world and a rule. reproducible_test.cc has the other pairs, on simulated hosts.
    for (const auto& each : pairwise_where<2>(exists, worlds, kRules, placements, kDTypes, kBothSyncs)) {
      const auto& [other, rule, placed, dtype, sync] = each;
      if (text_of(other.world) != text_of(world) || other.transport != joined.transport) continue;
      const std::string key = std::string(name_of(dtype)) + ", " + rule.name + ", " + std::to_string(world.all);
      const Strategy one = reproducible(ShardingStrategy::kFullShard, dtype, rule, GradientSync::kLastMicrobatch);
      const TrainedStates& wanted =
          alone(key, [&] { return train({}, one, {.all = world.all, .saves = folder / ("alone, " + key)}); });
      Strategy strategy = reproducible(placed, dtype, rule, sync);
      strategy.gradient_accumulation = world.all / world.ranks;
      strategy.comm.transport = joined.transport;
      const std::string last = sync == GradientSync::kLastMicrobatch ? ", last" : ", each";
      cases.push_back({strategy, &wanted, key + ", " + name_of(placed) + " on " + text_of(world) + last});
    }
    ASSERT_FALSE(cases.empty()) << text_of(world);
    constexpr std::size_t kAtOnce = 8;  // eight cases end within the time that on_hosts gives its ranks
    for (std::size_t begin = 0; begin < cases.size(); begin += kAtOnce) {
      const auto train_cases = [&](const Mesh& mesh) {
        for (std::size_t i = begin; i < std::min(begin + kAtOnce, cases.size()); ++i) {
          const RunOptions run{.all = world.all, .saves = folder / cases[i].what};
          const TrainedStates trained = train_microbatches(mesh, cases[i].strategy, run);
          require(!trained.states.empty(), cases[i].what + " saved nothing");
          expect_same_bits(trained, *cases[i].wanted, cases[i].what);
          require(!::testing::Test::HasFailure(), cases[i].what);  // this process ends without a result of GoogleTest
        }
      };
      on_hosts(world.ranks, world.hosts, train_cases, cases[begin].strategy.comm);
    }
  }
}

TEST(Reproducible, SharedParametersOfEveryStrategyGiveTheBitsOfOneRank) {
  const World worlds[] = {{4, 1, 8}, {3, 1, 12}, {4, 1, 24}};
  const Placed placements[] = {Placed(ShardingStrategy::kShardGradients, /*shared=*/true),
                               Placed(ShardingStrategy::kShardGradOp, /*shared=*/true),
                               Placed(ShardingStrategy::kNoShard, /*shared=*/true)};
  const auto exists = [](const World& world, const Rule&, const Placed&, DType, GradientSync sync) {
    return goes(world, sync);
  };
  const TestFolder folder;
  MadeOnce<TrainedStates> alone;
  for (const auto& each : pairwise_where(exists, worlds, kRules, placements, kDTypes, kBothSyncs)) {
    const auto& [world, rule, placed, dtype, sync] = each;
    const std::string key = std::string(name_of(dtype)) + ", " + rule.name + ", " + std::to_string(world.all);
    const Strategy one = reproducible(ShardingStrategy::kFullShard, dtype, rule, GradientSync::kEachMicrobatch);
    const std::int64_t all = world.all;
    const TrainedStates& wanted =
        alone(key, [&] { return train({}, one, {.all = all, .saves = folder / ("alone, " + key)}); });
    const std::string last = sync == GradientSync::kLastMicrobatch ? ", last" : ", each";
    const std::string what = key + ", " + name_of(placed) + " on " + text_of(world) + last;
    const TrainedStates trained =
        train({.ranks = world.ranks}, reproducible(placed, dtype, rule, sync), {.all = all, .saves = folder / what});
    EXPECT_FALSE(trained.states.empty());
    expect_same_bits(trained, wanted, what);
  }
}

constexpr World kFewWorlds[] = {{2, 1, 8}, {4, 2, 8}, {8, 1, 8}, {3, 1, 12}, {2, 2, 12}};

// The microbatches of a rank may all have weight 0.
TEST(Reproducible, MicrobatchesOfUnequalWeightsGiveTheBitsOfOneRank) {
  const Placed placements[] = {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradients};
  const auto exists = [](const World& world, const Placed&, GradientSync sync) { return goes(world, sync); };
  const std::vector<double> weights = {0.5, 1, 2, 0};
  MadeOnce<TrainedStates> alone;
  for (const auto& each : pairwise_where(exists, kFewWorlds, placements, kBothSyncs)) {
    const auto& [world, placed, sync] = each;
    const RunOptions run{.all = world.all, .weights = weights};
    const Strategy one = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], sync);
    const TrainedStates& wanted = alone(std::to_string(run.all), [&] {
      const TrainedStates weighted = train({}, one, run);
      EXPECT_NE(weighted.steps[0].loss, train({}, one, {.all = run.all}).steps[0].loss) << "weights count";
      return weighted;
    });
    expect_same_bits(
        train({.ranks = world.ranks, .hosts = world.hosts}, reproducible(placed, DType::kF32, kRules[0], sync), run),
        wanted, name_of(placed) + " on " + text_of(world));
  }
}

TEST(Reproducible, OverflowOfOneMicrobatchSkipsTheStepOnAnyNumberOfRanks) {
  const Placed placements[] = {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard};
  const auto exists = [](const World& world, const Placed&, GradientSync sync) { return goes(world, sync); };
  MadeOnce<TrainedStates> alone;
  for (const auto& each : pairwise_where(exists, kFewWorlds, placements, kBothSyncs)) {
    const auto& [world, placed, sync] = each;
    const RunOptions run{.all = world.all, .overflows = 5};
    const Strategy one = reproducible(ShardingStrategy::kFullShard, DType::kF16, kRules[0], sync);
    const TrainedStates& wanted = alone(std::to_string(run.all), [&] { return train({}, one, run); });
    EXPECT_FALSE(wanted.steps[0].overflow);
    EXPECT_TRUE(wanted.steps[1].overflow);
    EXPECT_EQ(wanted.steps[2].loss_scale, wanted.steps[0].loss_scale / 2);
    expect_same_bits(
        train({.ranks = world.ranks, .hosts = world.hosts}, reproducible(placed, DType::kF16, kRules[0], sync), run),
        wanted, name_of(placed) + " on " + text_of(world));
  }
}

/// The calls that rank 0 made in the steps of a run, and rank 0's results with the Engine's own counts (TrafficCounts).
struct Sent {
  CallsOfGroups calls;
  TrainedStates trained;
};

Sent sent_by(ThreadRanks ranks, Strategy strategy, RunOptions run) {
  std::mutex mutex;
  std::vector<std::unique_ptr<CallsOfGroups>> counts;
  thread_local CallsOfGroups* own = nullptr;
  thread_local CallsOfGroups at_first;
  ranks.wrap_groups = [&](std::shared_ptr<GroupFactory> factory) -> std::shared_ptr<GroupFactory> {
    const std::lock_guard lock(mutex);
    own = counts.emplace_back(std::make_unique<CallsOfGroups>()).get();
    return wrapped_groups(std::move(factory), [counted = own](const std::string& use, auto group) {
      return std::make_shared<CountedCollectives>(std::move(group), (*counted)[use]);
    });
  };
  run.has_begun = [] { at_first = *own; };
  if (strategy.deal.microbatches == 0) strategy.gradient_accumulation = run.all / ranks.ranks;
  Sent sent;
  run_ranks(ranks, [&](const Mesh& mesh) {
    TrainedStates trained = train_microbatches(mesh, strategy, run);
    if (mesh.rank() != 0) return;
    for (const auto& [use, calls] : *own) {
      const Calls before = at_first.contains(use) ? at_first.at(use) : Calls{};
      sent.calls[use] = {calls.calls - before.calls, calls.bytes - before.bytes};
    }
    sent.trained = std::move(trained);
  });
  return sent;
}

/// Returns the number of calls in each kind of group.
std::map<std::string, std::int64_t> numbers_of(const CallsOfGroups& calls) {
  std::map<std::string, std::int64_t> numbers;
  for (const auto& [use, each] : calls) numbers[use] = each.calls;
  return numbers;
}

TEST(ReproducibleTraffic, PowersOfTwoSendWhatTheySendWithoutTheKey) {
  const ShardingStrategy kinds[] = {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradients,
                                    ShardingStrategy::kNoShard};
  const int numbers[] = {2, 4, 8};
  for (const auto& [ranks, kind, sync] : pairwise_of(numbers, kinds, kBothSyncs)) {
    SCOPED_TRACE(name_of(kind) + ", " + std::to_string(ranks) + " ranks, sync " +
                 std::to_string(static_cast<int>(sync)));
    const Strategy with = reproducible(kind, DType::kF32, kRules[0], sync);
    Strategy without = with;
    without.reproducible = false;
    const Sent a = sent_by({.ranks = ranks}, with, {.all = 8}), b = sent_by({.ranks = ranks}, without, {.all = 8});
    for (const char* const use : {"gather", "reduce", "replicate"}) {
      EXPECT_EQ(a.calls.contains(use), b.calls.contains(use)) << use;
      if (!a.calls.contains(use) || !b.calls.contains(use)) continue;
      EXPECT_EQ(a.calls.at(use).calls, b.calls.at(use).calls) << use;
      EXPECT_EQ(a.calls.at(use).bytes, b.calls.at(use).bytes) << use;
    }
    EXPECT_LE(a.calls.at("world").calls, b.calls.at("world").calls) << "agreements";
    const TrafficCounts &one = a.trained.traffic, &other = b.trained.traffic;
    EXPECT_EQ(one.gathers, other.gathers);
    EXPECT_EQ(one.gathered_bytes, other.gathered_bytes);
    EXPECT_EQ(one.reductions, other.reductions);
    EXPECT_EQ(one.reduced_bytes, other.reduced_bytes);
    EXPECT_GT(one.reduced_bytes, 0);
  }
}

TEST(ReproducibleTraffic, SumsOfSubtreesHaveThePlannedBytes) {
  for (const World& world : {World{2, 1, 6}, World{4, 1, 24}, World{3, 1, 18}}) {
    for (const ShardingStrategy kind :
         {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradients, ShardingStrategy::kNoShard}) {
      Strategy strategy = reproducible(kind, DType::kF32, kRules[0], GradientSync::kLastMicrobatch);
      strategy.gradient_accumulation = world.all / world.ranks;
      Topology topology;
      topology.world_size = topology.local_world_size = world.ranks;
      topology.launcher = "thread";
      Tiny shapes = make_tiny({}, /*deferred=*/true);
      const MemoryPlan plan = plan_in_detail(*shapes, strategy, topology);
      EXPECT_GT(plan.block_bytes_of_step(), 0);
      const TrainedStates trained = train({.ranks = world.ranks}, strategy, {.all = world.all});
      EXPECT_EQ(trained.traffic.reduced_bytes, std::ssize(trained.steps) * plan.block_bytes_of_step())
          << name_of(kind) << " on " << text_of(world);
    }
  }
}

// Ranks tell each other their speeds in the message that ends a step.
TEST(ReproducibleTraffic, ADealAddsNoCollective) {
  Strategy even =
      reproducible(ShardingStrategy::kShardGradients, DType::kF32, kRules[0], GradientSync::kLastMicrobatch);
  Strategy never = even, dealt = even;
  never.deal = {.by = DealBy::kSpeed, .window = 1000};
  dealt.deal = {.by = DealBy::kSpeed, .window = 1};
  const RunOptions run{.all = 12, .slow_rank = 1};
  const Sent by_speed = sent_by({.ranks = 2}, dealt, run), not_dealt = sent_by({.ranks = 2}, never, run);
  EXPECT_EQ(by_speed.calls, not_dealt.calls);
  EXPECT_EQ(numbers_of(by_speed.calls), numbers_of(sent_by({.ranks = 2}, even, run).calls));
}

TEST(ReproducibleDeal, EveryRuleAndPlacementThatGoesGivesTheBitsOfOneRank) {
  const Placed placements[] = {ShardingStrategy::kNoShard,
                               ShardingStrategy::kShardOptimizer,
                               ShardingStrategy::kShardGradients,
                               Placed(ShardingStrategy::kFullShard, /*shared=*/true),
                               Placed(ShardingStrategy::kShardGradOp, /*shared=*/true),
                               Placed(ShardingStrategy::kHybridShard, /*shared=*/true)};
  const TestFolder folder;
  MadeOnce<TrainedStates> alone;
  int uneven = 0;
  for (const auto& each : pairwise_of(placements, kRules, kDTypes)) {
    const auto& [placed, rule, dtype] = each;
    const bool has_replicas = placed.kind == ShardingStrategy::kHybridShard;
    const std::string key = std::string(name_of(dtype)) + ", " + rule.name, what = key + ", " + name_of(placed);
    Strategy strategy = reproducible(placed, dtype, rule, GradientSync::kLastMicrobatch);
    const Strategy one = reproducible(ShardingStrategy::kFullShard, dtype, rule, GradientSync::kLastMicrobatch);
    const TrainedStates& wanted =
        alone(key, [&] { return train({}, one, {.all = 12, .saves = folder / ("alone, " + key)}); });
    strategy.deal = {.by = DealBy::kSpeed, .window = 1};
    const ThreadRanks ranks{.ranks = has_replicas ? 4 : 2, .hosts = has_replicas ? 2 : 1};
    const TrainedStates trained = train(ranks, strategy, {.all = 12, .slow_rank = 1, .saves = folder / what});
    EXPECT_FALSE(trained.states.empty());
    expect_same_bits(trained, wanted, what);
    EXPECT_EQ(trained.counts[0], 12 / ranks.ranks) << "even at first";
    uneven += trained.counts.back() != trained.counts[0] ? 1 : 0;
  }
  EXPECT_GT(uneven, 0) << "rank 1 is slow";
}

}  // namespace reproducible_test
}  // namespace tessera::testing
