// Tests the simulation of many ranks, with stragglers and jitter.

#include "planner/simulated_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/base/status.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

SimulatedWorld world_of(const TimedPlan& timed, const WorldOptions& options) {
  const auto world = simulate_world(timed.plan(), timed.profile, timed.links, options);
  EXPECT_TRUE(world.ok()) << world.status();
  return world.ok() ? *world : SimulatedWorld();
}

TEST(SimulatedWorld, EqualRanksTakeExactlyThePredictedTime) {
  std::mt19937_64 random(21);
  for (int i = 0; i < 1000; ++i) {
    const RandomPlan plan = random_plan(random);
    const double seconds = plan.timed.predicted().seconds;
    const SimulatedWorld world = world_of(plan.timed, {.steps = 3});
    EXPECT_EQ(world.seconds, std::vector<double>(3, seconds)) << plan.text;
    EXPECT_EQ(world.mean_s, seconds);
    EXPECT_EQ(world.p10_s, seconds);
    EXPECT_EQ(world.p90_s, seconds);
  }
}

TEST(SimulatedWorld, StragglerLengthensAComputeBoundStepByItsFactor) {
  for (const StrategyCase& strategy : all_strategies()) {
    const TimedPlan timed = timed_plan(strategy, 3);  // these links cost nothing
    const double seconds = timed.predicted().seconds;
    for (const double factor : {1.5, 4.0}) {
      const int last = timed.input.placement.mesh.world_size() - 1;
      for (const double each : world_of(timed, {.stragglers = {{last, factor}}, .steps = 4}).seconds)
        EXPECT_NEAR(each, factor * seconds, 1e-9) << strategy.name;
    }
    for (const double each : world_of(timed, {.stragglers = {{0, 0.5}}, .steps = 4}).seconds)
      EXPECT_NEAR(each, seconds, 1e-9) << strategy.name;  // a fast rank does not speed up any other rank
  }
}

TEST(SimulatedWorld, JitterCostsTimeAndIsTheSameForTheSameSeed) {
  for (const StrategyCase& strategy : all_strategies()) {
    TimedPlan timed = timed_plan(strategy, 6);
    timed.links = {links_of(1e-9), links_of(1e-9)};
    const SimulatedWorld world = world_of(timed, {.jitter = 0.2, .seed = 5, .steps = 20});
    EXPECT_GT(world.mean_s, timed.predicted().seconds) << strategy.name;
    EXPECT_LT(world.mean_s, 1.5 * timed.predicted().seconds) << strategy.name;
    EXPECT_LT(world.p10_s, world.p90_s);
    EXPECT_TRUE(std::ranges::count(world.seconds, world.p10_s) > 0 &&
                std::ranges::count(world.seconds, world.p90_s) > 0);
    EXPECT_EQ(world.seconds, world_of(timed, {.jitter = 0.2, .seed = 5, .steps = 20}).seconds);
    EXPECT_NE(world.seconds, world_of(timed, {.jitter = 0.2, .seed = 6, .steps = 20}).seconds);
  }
}

TEST(SimulatedWorld, StallOfARankLengthensAStepBySoMuch) {
  for (const StrategyCase& strategy : all_strategies()) {
    const TimedPlan timed = timed_plan(strategy, 3);
    const double seconds = timed.predicted().seconds;
    for (const double each : world_of(timed, {.stall_share = 1, .stall_s = 2, .steps = 3}).seconds)
      EXPECT_NEAR(each, seconds + 2, 1e-9) << strategy.name;
    const double rare = world_of(timed, {.stall_share = 0.05, .stall_s = 2, .steps = 100}).mean_s;
    EXPECT_GT(rare, seconds + 0.1) << strategy.name;
    EXPECT_LT(rare, seconds + 1.5) << strategy.name;
  }
}

TEST(SimulatedWorld, MicrobatchesAreDealtByTheSpeedsOfRanks) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardGradients, {1, 2, 0, 0}, 3);
  timed.input.wire.accumulation = 4;
  timed.input.wire.sync = GradientSync::kLastMicrobatch;
  const WorldOptions options{.stragglers = {{1, 3.0}}, .steps = 3};
  EXPECT_TRUE(world_of(timed, options).dealt.empty());
  EXPECT_GT(world_of(timed, options).mean_s, 4 * 12 * 3);  // a microbatch takes 12 s
  timed.input.wire.longest_run = 8;
  const SimulatedWorld dealt = world_of(timed, options);
  EXPECT_EQ(dealt.dealt, (std::vector<std::int64_t>{6, 2}));
  EXPECT_GT(dealt.mean_s, 72);
  EXPECT_LT(dealt.mean_s, 80);
  EXPECT_EQ(world_of(timed, {.steps = 3}).dealt, (std::vector<std::int64_t>{4, 4})) << "ranks that are alike";
}

TEST(SimulatedWorld, LongerLagHidesMoreJitter) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardGradients, {1, 8, 0, 0}, 12, 1 << 16);
  timed.input.wire.reduces_in_background = false;
  timed.links.shard = shared_memory_links(1e-12);
  const auto mean = [&](std::int64_t ahead) {
    timed.input.wire.reductions_ahead = ahead;
    return world_of(timed, {.jitter = 0.3, .steps = 20}).mean_s;
  };
  EXPECT_LT(mean(2), mean(0));
  EXPECT_LT(mean(6), mean(2));
}

TEST(SimulatedWorld, TraceShowsOnlyTheChosenRanks) {
  TimedPlan timed = timed_plan(ShardingStrategy::kHybridShard, {2, 2, 0, 0}, 3);
  timed.links = {links_of(1e-7), links_of(1e-7)};
  const SimulatedWorld world = world_of(timed, {.jitter = 0.1, .steps = 3, .traced = {0, 3}});
  std::map<std::pair<int, int>, double> end_of_lane;
  const nlohmann::json events = nlohmann::json::parse("[" + world.trace + "]");
  EXPECT_GT(events.size(), 100u);
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> lanes;
  for (const auto& event : events) {
    EXPECT_TRUE(event.at("pid") == 0 || event.at("pid") == 3);
    const double begin = event.at("ts"), seconds = event.at("dur");
    EXPECT_GT(seconds, 0);
    lanes[{event.at("pid"), event.at("tid")}].emplace_back(begin, begin + seconds);
  }
  for (auto& [lane, spans] : lanes) {
    std::ranges::sort(spans);
    for (std::size_t i = 1; i < spans.size(); ++i) EXPECT_GE(spans[i].first, spans[i - 1].second - 1e-3);
  }
  EXPECT_EQ(world_of(timed, {}).trace, "");
}

TEST(SimulatedWorld, FourThousandRanksAreSimulated) {
  TimedPlan timed = timed_plan(ShardingStrategy::kHybridShard, {512, 8, 0, 0}, 24);
  timed.links = {links_of(1e-9, 1e-5), links_of(1e-9, 1e-5)};
  timed.links.shard.cpu_s_per_byte = 1e-10;
  const double seconds = timed.predicted().seconds;
  EXPECT_EQ(world_of(timed, {.steps = 1}).mean_s, seconds);
  EXPECT_GT(world_of(timed, {.jitter = 0.05, .steps = 2}).mean_s, seconds);
}

TEST(SimulatedWorld, OptionsOutOfRangeAreRefusedByName) {
  const TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 2);
  const auto refusal = [](const TimedPlan& plan, const WorldOptions& options) {
    const absl::Status status = simulate_world(plan.plan(), plan.profile, plan.links, options).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kUsage);
    return message_of(status);
  };
  EXPECT_EQ(refusal(timed, {.jitter = -1}),
            "simulated world: jitter must be from 0 to 10, got -1. [T0631] hint: 0.05 is usual");
  EXPECT_EQ(refusal(timed, {.jitter = std::numeric_limits<double>::quiet_NaN()}),
            "simulated world: jitter must be from 0 to 10, got nan. [T0631] hint: 0.05 is usual");
  EXPECT_EQ(refusal(timed, {.stragglers = {{4, 2.0}}}),
            "simulated world: a straggler is rank 4, and the mesh has 4. [T0633] hint: ranks count from 0");
  EXPECT_EQ(refusal(timed, {.stragglers = {{3, 0.0}}}),
            "simulated world: the factor of straggler 3 must be above 0 and at most 1e+06, got 0. [T0634] hint: 2 "
            "takes twice as long");
  EXPECT_EQ(refusal(timed, {.steps = 0}),
            "simulated world: steps must be from 1 to 100000, got 0. [T0632] hint: a few dozen tell enough");
  EXPECT_EQ(refusal(timed, {.traced = {-1}}),
            "simulated world: a traced rank is -1, and the mesh has 4. [T0635] hint: ranks count from 0");
  EXPECT_EQ(refusal(timed_plan(ShardingStrategy::kNoShard, {1, 4097, 0, 0}, 1), {}),
            "simulated world: wants at most 4096 ranks, got a mesh of 4097. [T0630] hint: simulate fewer, and scale");
}

/// A plan whose ranks also compute microbatches of slower ranks.
TimedPlan with_backups(std::int64_t backups) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardGradients, {1, 4, 0, 0}, 3);  // these links cost nothing
  timed.input.wire.sync = GradientSync::kLastMicrobatch;
  timed.input.wire.reproducible = true;
  timed.input.wire.accumulation = 4;
  timed.input.wire.longest_run = 8;
  timed.input.wire.backups = backups;
  return timed;
}

TEST(SimulatedWorld, BackupsMakeStallsShorterAndChangeNothingForRanksThatAreAlike) {
  const SimulatedWorld alike = world_of(with_backups(3), {.steps = 3});
  EXPECT_EQ(alike.seconds, world_of(with_backups(0), {.steps = 3}).seconds);
  EXPECT_EQ(alike.made_again, 0);
  const double even_s = alike.mean_s;
  // A rank stops for twice the time of a step, so other ranks make its last three microbatches.
  const WorldOptions stalls{.seed = 3, .stall_share = 0.1, .stall_s = 2 * even_s, .steps = 50};
  const SimulatedWorld with = world_of(with_backups(3), stalls), without = world_of(with_backups(0), stalls);
  EXPECT_GT(with.made_again, 0.1);
  EXPECT_LT(with.mean_s, without.mean_s);
  const SimulatedWorld one = world_of(with_backups(1), stalls);
  EXPECT_LT(with.mean_s, one.mean_s);
  EXPECT_LT(one.made_again, with.made_again);
  EXPECT_EQ(without.made_again + without.twice, 0);
}

}  // namespace
}  // namespace tessera::testing
