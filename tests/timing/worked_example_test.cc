// A step of FULL_SHARD with two units, by hand. Two ranks, prefetch 1, a reduction under way while the next unit is
// computed.
//
//   seconds    what                                       wire
//    0.0       rest, 0.5
//    0.5       waits for the root's parameters, 0.5       gather root [0.5, 1.0]
//    1.0       forward of the root, 1                     gather block [1.0, 4.0], ahead of its use
//    2.0       waits for the block's parameters, 2
//    4.0       forward of the block, 2
//    6.0       backward of the block, 4; it is still gathered
//   10.0       backward of the root, 2                    reduction block [10.0, 11.5]
//   12.0       the block's sum is there; waits for the root's, 0.25       reduction root [12.0, 12.25]
//   12.25      agreement, 0.25
//   12.5       update of half of the elements, 1.5
//   14.0

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "sharding/timing/simulated_world.h"
#include "tests/timing/timed_plans.h"

namespace tessera::testing {
namespace {

TimedPlan example() {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 2, 0, 0}, 1, 6144);
  const std::int64_t root_numel = 1024;
  timed.input.units[0].groups[0].layout = Layout::pack({&root_numel, 1}, 2);
  timed.profile.updated_elements = 1024 + 6144;
  const std::vector<double> seconds = {1, 2, 4, 2};
  for (std::size_t i = 0; i < seconds.size(); ++i) timed.profile.entries[i].seconds = seconds[i];
  // A rank sends half of 4 and of 24 KiB.
  timed.links.shard.all_gather = {0, 1.0 / 4096};
  timed.links.shard.reduce_scatter = {0, 1.0 / 8192};
  timed.links.shard.small = {0.25, 0};
  return timed;
}

TEST(WorkedExample, OfFullShardWithTwoUnits) {
  const PredictedStep step = example().predicted();
  EXPECT_EQ(step.seconds, 14);
  EXPECT_EQ(step.compute_s, 9);
  EXPECT_DOUBLE_EQ(step.update_s, 1.5);
  EXPECT_EQ(step.rest_s, 0.5);
  EXPECT_EQ(step.stretch_s, 0);
  EXPECT_EQ(step.exposed_gather_s, 2.5);
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

TEST(WorkedExample, AsAPicture) {
  const TimedPlan timed = example();
  const auto world = simulate_world(timed.plan(), timed.profile, timed.links, {.steps = 2, .traced = {1}});
  ASSERT_TRUE(world.ok()) << world.status();
  EXPECT_EQ(world->seconds, (std::vector<double>{14, 14}));
  std::vector<std::string> seen;
  for (const auto& event : nlohmann::json::parse("[" + world->trace + "]")) {
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_EQ(event.at("pid"), 1);
    if (event.at("ts").get<double>() >= 14e6) continue;
    seen.push_back(event.at("name").get<std::string>() + " " + std::to_string(event.at("tid").get<int>()) + " " +
                   std::to_string(event.at("ts").get<int>() / 1000) + "+" +
                   std::to_string(event.at("dur").get<int>() / 1000));
  }
  EXPECT_EQ(seen,
            (std::vector<std::string>{
                "rest 0 0+500", "all_gather (root) 1 500+500", "wait (root) 0 500+500", "forward (root) 0 1000+1000",
                "all_gather blocks.0 1 1000+3000", "wait blocks.0 0 2000+2000", "forward blocks.0 0 4000+2000",
                "backward blocks.0 0 6000+4000", "reduce blocks.0 2 10000+1500", "backward (root) 0 10000+2000",
                "reduce (root) 2 12000+250", "wait (root) 0 12000+250", "agree 6 12250+250", "wait 0 12250+250",
                "update (root) 0 12500+214", "update blocks.0 0 12714+1285"}));
}

}  // namespace
}  // namespace tessera::testing
