// A step of FULL_SHARD with two units, computed by hand. There are two ranks, prefetch is 1, and a reduction is under
// way while the next unit is computed.
//
//   seconds    what                                       wire
//    0.0       rest of the step (rest_seconds), 0.5       gather root [0.0, 0.5], begun at the end of the step before
//    0.5       forward of the root, 1                     gather block [0.5, 3.5], before it is used
//    1.5       waits for the block's parameters, 2
//    3.5       forward of the block, 2
//    5.5       backward of the block (still gathered), 4
//    9.5       backward of the root, 2                    reduction block [9.5, 11.0]
//   11.5       the block's sum is ready; waits for the root's, 0.25       reduction root [11.5, 11.75]
//   11.75      agreement, 0.25
//   12.0       update of half of the elements, 1.5
//   13.5

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "planner/simulated_world.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

TimedPlan example() {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 2, 0, 0}, 1, 6144);
  const std::int64_t root_numel = 1024;
  timed.input.units[0].groups[0].layout = Layout::pack({&root_numel, 1}, 2);
  timed.profile.updated_elements = 1024 + 6144;
  const std::vector<double> seconds = {1, 2, 4, 2};
  for (std::size_t i = 0; i < seconds.size(); ++i) timed.profile.entries[i].seconds = seconds[i];
  // A rank sends half of 4 KiB and half of 24 KiB.
  timed.links.shard.all_gather = {0, 1.0 / 4096};
  timed.links.shard.reduce_scatter = {0, 1.0 / 8192};
  timed.links.shard.small = {0.25, 0};
  return timed;
}

TEST(WorkedExample, FullShardOfTwoUnitsTakesTheTimesOfThePage) {
  const PredictedStep step = example().predicted();
  EXPECT_EQ(step.seconds, 13.5);
  EXPECT_EQ(step.compute_s, 9);
  EXPECT_DOUBLE_EQ(step.update_s, 1.5);
  EXPECT_EQ(step.rest_s, 0.5);
  EXPECT_EQ(step.stretch_s, 0);
  EXPECT_EQ(step.exposed_gather_s, 2);
  EXPECT_EQ(step.exposed_reduction_s, 0.25);
  EXPECT_EQ(step.exposed_publish_s, 0);
  EXPECT_EQ(step.agreement_s, 0.25);
  EXPECT_EQ(step.shard.busy_s, 0.5 + 3 + 1.5 + 0.25);
  EXPECT_EQ(step.shard.calls, 4);
  EXPECT_EQ(step.sent_bytes(), 2 * (2048 + 12288));
  EXPECT_EQ(step.bound, StepBound::kCompute);
  EXPECT_EQ(name_of(step.bound), "compute");
  EXPECT_TRUE(step.left_out.empty());
}

TEST(WorkedExample, TraceHasTheSpansOfThePage) {
  const TimedPlan timed = example();
  const auto world = simulate_world(timed.plan(), timed.profile, timed.links, {.steps = 2, .traced = {1}});
  ASSERT_TRUE(world.ok()) << world.status();
  EXPECT_EQ(world->seconds, (std::vector<double>{13.5, 13.5}));
  std::vector<std::string> seen;
  for (const auto& event : nlohmann::json::parse("[" + world->trace + "]")) {
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_EQ(event.at("pid"), 1);
    if (event.at("ts").get<double>() >= 13.5e6) continue;
    seen.push_back(event.at("name").get<std::string>() + " " + std::to_string(event.at("tid").get<int>()) + " " +
                   std::to_string(event.at("ts").get<int>() / 1000) + "+" +
                   std::to_string(event.at("dur").get<int>() / 1000));
  }
  EXPECT_EQ(seen, (std::vector<std::string>{
                      "rest 0 0+500", "all_gather (root) 1 0+500", "forward (root) 0 500+1000",
                      "all_gather blocks.0 1 500+3000", "wait blocks.0 0 1500+2000", "forward blocks.0 0 3500+2000",
                      "backward blocks.0 0 5500+4000", "reduce blocks.0 2 9500+1500", "backward (root) 0 9500+2000",
                      "reduce (root) 2 11500+250", "wait (root) 0 11500+250", "agree 6 11750+250", "wait 0 11750+250",
                      "update (root) 0 12000+214", "update blocks.0 0 12214+1285"}));
}

}  // namespace
}  // namespace tessera::testing
