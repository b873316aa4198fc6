// Tests the predicted cost of outer steps.

#include "planner/outer_cost.h"

#include <gtest/gtest.h>

#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

constexpr std::int64_t kBlockNumel = 1 << 16;

/// Returns a plan of two replicas of `shards` ranks, with four blocks of the same size and a small root.
TimedPlan with_sync(SyncType type, std::int64_t every, int shards = 1,
                    ShardingStrategy strategy = ShardingStrategy::kNoShard) {
  TimedPlan timed = timed_plan(strategy, {1, shards, 0, 0}, 4, kBlockNumel);
  timed.input.update.outer.type = type;
  timed.input.update.outer.every = every;
  timed.input.placement.replicas = 2;
  timed.links.replicate = links_of(0);
  timed.links.replicate.all_reduce.beta_s_per_byte = 1e-6;
  return timed;
}

/// Returns the number of bytes that a rank sends if it sums all masters with one other rank, at `an_element` bytes per
/// element.
double bytes_of_all(const TimedPlan& timed, double an_element) {
  double numel = 0;
  for (const UnitShape& unit : timed.input.units) numel += static_cast<double>(unit.trainable_numel());
  return 2 * (numel / 2) * an_element;
}

TEST(OuterCost, IsTheCostOfAllSumsDividedByTheStepsBetween) {
  for (const SyncType type : {SyncType::kLocalSgd, SyncType::kDiloco}) {
    TimedPlan timed = with_sync(type, 10);
    const OuterCost cost = outer_cost(timed.plan(), 1, timed.links);
    EXPECT_NEAR(cost.exposed_s, bytes_of_all(timed, 4) * 1e-6 / 10, 1e-9);
    EXPECT_NEAR(static_cast<double>(cost.replicate.sent_bytes), bytes_of_all(timed, 4) / 10, 1);
    EXPECT_EQ(cost.replicate.calls, 1);  // five calls in ten steps, rounded up to one per step
    EXPECT_EQ(cost.shard.calls, 0);
    const PredictedStep with = timed.predicted();
    timed.input.update.outer = {};
    const PredictedStep without = timed.predicted();
    EXPECT_NEAR(with.seconds, without.seconds + cost.exposed_s, 1e-12);
    EXPECT_EQ(with.exposed_outer_s, cost.exposed_s);
  }
}

TEST(OuterCost, OuterGradientsUseTheBitsOfTheirCompression) {
  TimedPlan timed = with_sync(SyncType::kDiloco, 10);
  timed.input.wire.compression.gradients = timed.input.wire.compression.sums = WireForm::kInt4;
  const double int4 = 0.5 + 4.0 / 256;  // half a byte, and a share of the scale of a run of 256 elements
  EXPECT_NEAR(outer_cost(timed.plan(), 1, timed.links).exposed_s, bytes_of_all(timed, int4) * 1e-6 / 10, 1e-6);
  timed.links.replicate.reduces_in_background = false;  // as in shared memory, where nothing is compressed
  EXPECT_NEAR(outer_cost(timed.plan(), 1, timed.links).exposed_s, bytes_of_all(timed, 4) * 1e-6 / 10, 1e-9);
}

TEST(OuterCost, StreamExposesOnlyTheTimeBeyondItsDelay) {
  TimedPlan timed = with_sync(SyncType::kStreamingDiloco, 20);
  timed.input.update.outer.fragments = 4;
  timed.input.update.outer.delay = 1;
  const double block_s = 4.0 * kBlockNumel * 1e-6;  // the cost of the sum of one fragment, which is a block
  EXPECT_EQ(outer_cost(timed.plan(), 2 * block_s, timed.links).exposed_s, 0);
  // The units are the root and four blocks, so fragment 0 has the root and the last block.
  const double root_s = 4e-6 * static_cast<double>(timed.input.units[0].trainable_numel());
  EXPECT_NEAR(outer_cost(timed.plan(), 0.75 * block_s, timed.links).exposed_s, (4 * 0.25 * block_s + root_s) / 20,
              1e-9);
  timed.input.update.outer.delay = 2;
  EXPECT_EQ(outer_cost(timed.plan(), 0.75 * block_s, timed.links).exposed_s, 0);
  timed.links.replicate.reduces_in_background = false;  // as in shared memory, where the call makes the sum
  EXPECT_NEAR(outer_cost(timed.plan(), 2 * block_s, timed.links).exposed_s, bytes_of_all(timed, 4) * 1e-6 / 20, 1e-9);
}

TEST(OuterCost, ShardedReplicaAddsAGatherOnTheShardAxis) {
  TimedPlan timed = with_sync(SyncType::kLocalSgd, 10, 4, ShardingStrategy::kShardOptimizer);
  timed.links.shard = links_of(1e-9);
  const OuterCost cost = outer_cost(timed.plan(), 1, timed.links);
  EXPECT_EQ(cost.shard.calls, 1);
  EXPECT_GT(cost.shard.sent_bytes, 0);
  EXPECT_NEAR(cost.exposed_s, cost.shard.busy_s + cost.replicate.busy_s, 1e-12);
}

TEST(OuterCost, CompressedGatherHasTheBytesThatAreSent) {
  TimedPlan timed = with_sync(SyncType::kLocalSgd, 1, 4, ShardingStrategy::kShardOptimizer);
  timed.links.shard = links_of(1e-9);
  const OuterCost plain = outer_cost(timed.plan(), 1, timed.links);
  timed.input.wire.gathers = WireForm::kInt8;
  const OuterCost int8 = outer_cost(timed.plan(), 1, timed.links);
  const double share = (1 + 4.0 / 256) / 4;  // a byte, and a share of the scale of a run of 256, relative to fp32
  EXPECT_NEAR(static_cast<double>(int8.shard.sent_bytes), share * static_cast<double>(plain.shard.sent_bytes),
              1e-3 * static_cast<double>(plain.shard.sent_bytes));
  EXPECT_LT(int8.exposed_s, plain.exposed_s);
  EXPECT_EQ(int8.replicate.sent_bytes, plain.replicate.sent_bytes);
}

TEST(OuterCost, OneReplicaCostsNothing) {
  TimedPlan timed = with_sync(SyncType::kDiloco, 10);
  timed.input.placement.replicas = 1;
  EXPECT_EQ(outer_cost(timed.plan(), 1, timed.links).exposed_s, 0);
  EXPECT_EQ(timed.predicted().exposed_outer_s, 0);
}

TEST(OuterCost, StartStepIsNamedAmongWhatIsLeftOut) {
  TimedPlan timed = with_sync(SyncType::kDiloco, 10);
  EXPECT_TRUE(timed.predicted().left_out.empty());
  timed.input.update.outer.start_step = 100;
  EXPECT_EQ(timed.predicted().left_out.size(), 1u);
}

}  // namespace
}  // namespace tessera::testing
