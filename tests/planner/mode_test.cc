// Tests runs of ranks that have clocks of their own. The event model gives the same runs as the simulator of
// benchmarks/push_orders.py. Other tests check the costs that a plan's steps have in this model.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "planner/mode_world.h"
#include "runtime/base/status.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

using nlohmann::json;
using Kind = ModeRule::Kind;

ModeRun run_of(const json& one) {
  ModeRun run;
  const auto kind = one.at("kind").get<std::string>();
  run.rule.kind = kind == "meeting" ? Kind::kMeeting : kind == "backups" ? Kind::kBackups : Kind::kAsynchronous;
  run.rule.every = one.value("every", std::int64_t{1});
  run.rule.spare = one.value("spare", std::int64_t{0});
  if (one.contains("max_staleness") && !one.at("max_staleness").is_null())
    run.rule.max_staleness = one.at("max_staleness").get<std::int64_t>();
  const auto costs = one.at("costs").get<std::vector<double>>();
  run.costs = {costs.at(0), costs.at(1), costs.at(2)};
  run.ranks = static_cast<int>(one.at("compute_s").size());
  run.steps = one.at("steps").get<std::int64_t>();
  return run;
}

// tests/benchmarks/push_orders_test.py compares the simulator of benchmarks/push_orders.py with the same file. All
// numbers are sums of powers of two, so they are equal to the last bit.
TEST(ModeClock, RunsAreThoseOfTheStudysSimulator) {
  std::ifstream file(TESSERA_MODE_CASES);
  const json cases = json::parse(file);
  ASSERT_GT(cases.size(), 20u);
  for (const json& one : cases) {
    const auto compute_s = one.at("compute_s").get<std::vector<std::vector<double>>>();
    const ModeRun run = run_of(one);
    const ModeTimeline timeline = play_mode(run, [&](int rank, std::int64_t step) {
      const std::vector<double>& own = compute_s[static_cast<std::size_t>(rank)];
      return own[static_cast<std::size_t>(step - 1) % own.size()];
    });
    std::vector<std::vector<double>> ends_s(compute_s.size());
    for (const ModeStep& step : timeline.steps) ends_s[static_cast<std::size_t>(step.rank)].push_back(step.pushed_s);
    EXPECT_EQ(ends_s, one.at("ends_s").get<std::vector<std::vector<double>>>()) << one.at("name");
    EXPECT_EQ(timeline.dropped, one.at("dropped").get<std::int64_t>()) << one.at("name");
    if (one.contains("ages")) {
      EXPECT_EQ(timeline.ages(), one.at("ages").get<std::vector<std::int64_t>>()) << one.at("name");
    }
  }
}

/// Returns [rank][step]: the time at which the step ends.
std::vector<std::vector<double>> ends_of(const ModeRun& run, const std::vector<std::vector<double>>& compute_s) {
  std::vector<std::vector<double>> ends_s(compute_s.size());
  const ModeTimeline timeline = play_mode(run, [&](int rank, std::int64_t step) {
    return compute_s[static_cast<std::size_t>(rank)][static_cast<std::size_t>(step - 1)];
  });
  for (const ModeStep& step : timeline.steps) ends_s[static_cast<std::size_t>(step.rank)].push_back(step.pushed_s);
  return ends_s;
}

TEST(ModeClock, FragmentsAreSummedWhileRanksCompute) {
  ModeRun run{.rule = {.every = 4, .delay = 1}, .costs = {}, .ranks = 1, .steps = 8};
  // Steps count from 1. Fragment 0 is sent after steps 2 and 6, and fragment 1 at the start and after step 4.
  run.costs.fragments = {{0.75, 0.125}, {1.5, 0}};
  EXPECT_EQ(ends_of(run, {std::vector<double>(8, 1.0)}),
            (std::vector<std::vector<double>>{{1.5, 2.5, 3.625, 4.625, 6.125, 7.125, 8.25, 9.25}}));
  run.rule.delay = 0;  // nothing hides a sum
  EXPECT_EQ(ends_of(run, {std::vector<double>(8, 1.0)}),
            (std::vector<std::vector<double>>{{1, 2.875, 3.875, 6.375, 7.375, 9.25, 10.25, 12.75}}));
}

TEST(ModeClock, RankWaitsForASlowOneOnlyWhenItNeedsTheSum) {
  ModeRun run{.rule = {.every = 2, .delay = 1}, .costs = {}, .ranks = 2, .steps = 4};
  run.costs.fragments = {{0.5, 0}};
  const std::vector<std::vector<double>> compute_s = {{1, 1, 1, 1}, {1, 3, 1, 1}};
  EXPECT_EQ(ends_of(run, compute_s), (std::vector<std::vector<double>>{{1, 2, 4.5, 5.5}, {1, 4, 5, 6}}));
  run.rule.delay = 2;
  EXPECT_EQ(ends_of(run, compute_s), (std::vector<std::vector<double>>{{1, 2, 3, 4.5}, {1, 4, 5, 6}}));
  run.rule.delay = 0;
  EXPECT_EQ(ends_of(run, compute_s), (std::vector<std::vector<double>>{{1, 4.5, 5.5, 7}, {1, 4.5, 5.5, 7}}));
}

ModeCost planned_cost(const TimedPlan& timed, int servers = 1) {
  const auto cost = mode_cost(timed.plan(), timed.profile, timed.links.shard, servers);
  EXPECT_TRUE(cost.ok()) << cost.status();
  return cost.ok() ? *cost : ModeCost();
}

ModeWorld played(const ModeCost& cost, int ranks, const WorldOptions& options) {
  const auto world = simulate_mode(cost, ranks, options);
  EXPECT_TRUE(world.ok()) << world.status();
  return world.ok() ? *world : ModeWorld();
}

/// Returns a plan of four ranks with a root and two blocks. A round takes 9 s, and the update takes 3 s.
TimedPlan timed_mode(SyncType type) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardOptimizer, {1, 4, 0, 0}, 2, 1 << 16);
  timed.input.update.outer.type = type;
  timed.links.shard = shared_memory_links(0);
  return timed;
}

double bytes_of(const TimedPlan& timed) { return 4 * static_cast<double>(timed.profile.updated_elements); }

TEST(ModeCost, RanksThatOwnShardsCopyAllValuesAndUpdateAllOfThem) {
  TimedPlan timed = timed_mode(SyncType::kAsynchronous);
  timed.input.wire.accumulation = 2;
  timed.links.shard = shared_memory_links(1e-6, 0.5);
  const ModeCost cost = planned_cost(timed);
  EXPECT_DOUBLE_EQ(cost.compute_s(), 2 * 9 + 0.5);
  EXPECT_DOUBLE_EQ(cost.costs.pull_s, bytes_of(timed) * 1e-6);
  EXPECT_DOUBLE_EQ(cost.costs.push_s, 3);
  EXPECT_EQ(cost.left_out.size(), 1u);
  timed.input.update.outer.type = SyncType::kHogwild;
  EXPECT_EQ(planned_cost(timed).costs.pull_s, 0);
  EXPECT_DOUBLE_EQ(planned_cost(timed).costs.push_s, 3);
  timed.links.shard = links_of(1e-6);
  EXPECT_EQ(planned_cost(timed).left_out.size(), 2u) << "a network's links stand for memory";
}

TEST(ModeCost, FirstRanksOfAStepShareItsSumAndItsUpdate) {
  TimedPlan timed = timed_mode(SyncType::kBackups);
  timed.input.update.outer.backups = 1;
  timed.links.shard = shared_memory_links(1e-6);
  timed.links.shard.small = {};
  const ModeCost cost = planned_cost(timed);
  EXPECT_EQ(cost.rule.kind, Kind::kBackups);
  EXPECT_EQ(cost.rule.spare, 1);
  EXPECT_NEAR(cost.costs.meet_s, 2.0 / 3 * bytes_of(timed) * 1e-6 + 1, 1e-4);
  timed.input.update.outer.backups = 3;
  EXPECT_DOUBLE_EQ(planned_cost(timed).costs.meet_s, 3) << "one rank sums nothing";
}

TEST(ModeCost, StepWaitsForWhatServersCannotHideBehindCompute) {
  TimedPlan timed = timed_mode(SyncType::kAsynchronous);
  timed.input.update.outer.asynchronous.owners = ShardOwners::kServers;
  timed.links.shard = links_of(1e-6);  // sending a block takes 0.26 s, and its forward takes 1 s
  const double root_s = 4 * 4096e-6, block_s = 4 * 65536e-6;
  const ModeCost hidden = planned_cost(timed, 2);
  EXPECT_NEAR(hidden.costs.pull_s, root_s, 1e-12) << "only the first unit";
  EXPECT_NEAR(hidden.costs.push_s, root_s + 3.0 / 2, 1e-12) << "the last unit, and the update by two servers";
  timed.links.shard = links_of(1e-5);  // sending a block takes 2.6 s
  const ModeCost slow = planned_cost(timed, 1);
  EXPECT_NEAR(slow.costs.pull_s, 10 * root_s + 2 * (10 * block_s - 1), 1e-9);
  // The gradients of the first block in backward are sent 2 s after backward begins. Backward lasts 6 s.
  EXPECT_NEAR(slow.costs.push_s, 2 + 2 * 10 * block_s + 10 * root_s - 6 + 3, 1e-9);
  EXPECT_NEAR(slow.served_s, 10 * (root_s + 2 * block_s), 1e-9) << "more than the update";
}

TEST(ModeCost, ReplicasOfSeveralRanksAreRefused) {
  TimedPlan timed = timed_mode(SyncType::kAsynchronous);
  timed.input.update.outer.asynchronous.owners = ShardOwners::kServers;
  timed.input.update.outer.asynchronous.replica_ranks = 2;
  const auto cost = mode_cost(timed.plan(), timed.profile, timed.links.shard, /*servers=*/1);
  EXPECT_EQ(exit_code_of(cost.status()), ExitCode::kConfig);
  EXPECT_NE(message_of(cost.status()).find("/sync/replica_ranks"), std::string::npos);
}

TEST(ModeWorld, RankAtHalfSpeedDelaysSynchronousRanksOnly) {
  const WorldOptions options{.stragglers = {{3, 2.0}}, .steps = 70};
  ModeCost cost;
  cost.pieces_s = {1.0};
  EXPECT_DOUBLE_EQ(played(cost, 4, options).seconds, 140);  // a meeting in every step
  cost.rule.kind = Kind::kAsynchronous;
  const ModeWorld free = played(cost, 4, options);
  EXPECT_DOUBLE_EQ(free.seconds, 80);
  EXPECT_EQ(free.steps, (std::vector<std::int64_t>{80, 80, 80, 40}));
  EXPECT_GT(free.staleness_mean, 2);
  cost.rule.max_staleness = 0;
  EXPECT_DOUBLE_EQ(played(cost, 4, options).seconds, 140);
  EXPECT_DOUBLE_EQ(played(cost, 4, options).staleness_mean, 1.5) << "0, 1, 2 and 3 pushes came before";
  cost.rule = {.kind = Kind::kBackups, .spare = 1};
  const ModeWorld backed = played(cost, 4, options);
  EXPECT_DOUBLE_EQ(backed.seconds, 70);
  EXPECT_GT(backed.dropped, 0);
  EXPECT_EQ(backed.staleness_mean, 0);
}

TEST(ModeWorld, StallsAndJitterCostRareMeetingsLess) {
  const WorldOptions options{.jitter = 0.1, .stall_share = 0.05, .stall_s = 3, .steps = 200};
  ModeCost cost;
  cost.pieces_s = {0.5, 0.5};
  const double each = played(cost, 4, options).seconds;
  EXPECT_GT(each, 200 * (1 + 0.05 * 3));
  cost.rule.every = 8;
  const ModeWorld rare = played(cost, 4, options);
  EXPECT_LT(rare.seconds, each);
  EXPECT_EQ(rare.seconds, played(cost, 4, options).seconds) << "the same seed gives the same world";
  cost.rule.kind = Kind::kAsynchronous;
  EXPECT_LT(played(cost, 4, options).seconds, rare.seconds);
}

TEST(ModeWorld, BusyServersBoundARun) {
  ModeCost cost;
  cost.rule.kind = Kind::kAsynchronous;
  cost.pieces_s = {1.0};
  cost.served_s = 0.2;
  EXPECT_DOUBLE_EQ(played(cost, 4, {.steps = 10}).seconds, 10);
  const ModeWorld many = played(cost, 8, {.steps = 10});
  EXPECT_DOUBLE_EQ(many.seconds, 16);
  EXPECT_TRUE(many.waits_for_servers);
}

TEST(ModeWorld, TraceShowsTheChosenRanksAlone) {
  ModeCost cost;
  cost.rule.kind = Kind::kAsynchronous;
  cost.pieces_s = {1.0};
  cost.costs = {0.25, 0.25, 0};
  const json events = json::parse("[" + played(cost, 3, {.steps = 2, .traced = {1}}).trace + "]");
  EXPECT_EQ(events.size(), 2u * 3) << events;  // a pull, compute and a push in each step; nobody waits
  for (const json& event : events) EXPECT_EQ(event.at("pid"), 1);
}

TEST(ModeWorld, OuterStepsOfEqualReplicasTakeThePredictedTime) {
  for (const SyncType type : {SyncType::kLocalSgd, SyncType::kStreamingDiloco}) {
    TimedPlan timed = timed_plan(ShardingStrategy::kShardOptimizer, {1, 4, 0, 0}, 4, 1 << 16);
    timed.input.update.outer.type = type;
    timed.input.update.outer.every = 5;
    timed.input.placement.replicas = 2;
    timed.links.shard = links_of(1e-7);
    timed.links.replicate = links_of(1e-3);  // the sum of a block takes longer than a step
    const PredictedStep step = timed.predicted();
    const ModeCost cost = cost_of_outer_steps(step, timed.plan(), timed.profile, timed.links);
    EXPECT_GT(cost.costs.meet_s, 0);
    EXPECT_EQ(cost.costs.fragments.size(), type == SyncType::kLocalSgd ? 1u : 4u);
    EXPECT_GT(cost.costs.fragments[0].publish_s, 0) << "masters are sharded, and parameters are not";
    EXPECT_EQ(cost.pieces_s.size(), timed.profile.entries.size()) << "each varies by itself";
    EXPECT_NEAR(played(cost, 2, {.steps = 20}).seconds, 20 * step.seconds, 1e-6);
  }
}

TEST(ModeWorld, OptionsOutOfRangeAreRefusedByName) {
  ModeCost cost;
  cost.pieces_s = {1.0};
  const auto refusal = [&](int ranks, const WorldOptions& options) {
    const absl::Status status = simulate_mode(cost, ranks, options).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kUsage);
    return message_of(status);
  };
  EXPECT_NE(refusal(4, {.stall_share = 1.5}).find("a stall must have a share from 0 to 1"), std::string::npos);
  EXPECT_NE(refusal(4, {.stall_share = 0.5, .stall_s = -1}).find("got 0.5 and -1"), std::string::npos);
  EXPECT_NE(refusal(4, {.stragglers = {{4, 2.0}}}).find("a straggler is rank 4"), std::string::npos);
  EXPECT_NE(refusal(4096, {.steps = 100000}).find("100000 steps of 4096 ranks"), std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
