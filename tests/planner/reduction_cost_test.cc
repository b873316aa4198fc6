// Tests the predicted cost of reductions, with and without compression.

#include "planner/script/reduction_cost.h"

#include <gtest/gtest.h>

#include "sharding/layout/factor_layout.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

constexpr std::int64_t kNumel = 1 << 20;

CallCost cost_of(TimedPlan timed) {
  const MemoryPlan plan = timed.plan();
  return shard_reduction_cost(plan, plan.units()[1].groups[0], timed.links.shard);
}

TEST(ReductionCost, RankSendsAllPartsButItsOwn) {
  TimedPlan cut = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 1, kNumel);
  TimedPlan whole = timed_plan(ShardingStrategy::kNoShard, {1, 4, 0, 0}, 1, kNumel);
  EXPECT_EQ(cost_of(cut).sent_bytes, 3 * kNumel);    // 3/4 of the 4 bytes of each element
  EXPECT_EQ(cost_of(whole).sent_bytes, 6 * kNumel);  // twice as many bytes
  cut.input.wire.reduce = whole.input.wire.reduce = DType::kBF16;
  EXPECT_EQ(cost_of(cut).sent_bytes, 3 * kNumel / 2);
  EXPECT_EQ(cost_of(whole).sent_bytes, 3 * kNumel / 2 + 3 * kNumel);  // contributions are bf16, and sums are fp32
  whole.input.placement.is_queued = true;
  EXPECT_EQ(cost_of(whole).sent_bytes, 3 * kNumel);
}

TEST(ReductionCost, CompressedAxesSendFewerBytes) {
  TimedPlan timed = timed_plan(ShardingStrategy::kNoShard, {1, 4, 0, 0}, 1, kNumel);
  timed.input.wire.compression.gradients = WireForm::kInt8;
  timed.input.wire.compression.sums = WireForm::kInt4;
  EXPECT_EQ(cost_of(timed).sent_bytes, 6 * kNumel);  // this transport does not compress anything
  timed.input.wire.compressed_shard_part = 1;
  const std::int64_t part = kNumel / 4, scales = part / 256 * 4;
  EXPECT_EQ(cost_of(timed).sent_bytes, 3 * (part + scales + part / 2 + scales));
}

/// A rank encodes its contributions to the other ranks and decodes theirs. Then it encodes its own sums once, and
/// decodes the sums of the other ranks.
TEST(ReductionCost, CompressionCostsEncodingAndDecodingTime) {
  TimedPlan timed = timed_plan(ShardingStrategy::kNoShard, {1, 4, 0, 0}, 1, kNumel);
  timed.input.wire.compressed_shard_part = 1;
  timed.input.wire.compression = {.gradients = WireForm::kInt8, .sums = WireForm::kLossless};
  timed.links.shard = links_of(1e-12);
  timed.links.shard.coding = {.lossless_s_per_byte = 3e-10, .int8_s_per_byte = 1e-10};
  const CallCost cost = cost_of(timed);
  EXPECT_NEAR(cost.coding_s, 4.0 * kNumel / 4 * (3 * 1e-10 + 2 * 3e-10), 1e-12);
  EXPECT_EQ(cost.sum_s, 0);
  timed.links.shard.sum_s_per_byte = 1e-9;
  EXPECT_DOUBLE_EQ(cost_of(timed).sum_s, 3 * kNumel * 1e-9) << "of what comes, in whatever form";
  EXPECT_EQ(cost.transfer_s, cost.coding_s) << "longer than the wire's";
  timed.links.shard.all_reduce.beta_s_per_byte = 1;
  EXPECT_EQ(cost_of(timed).transfer_s, static_cast<double>(cost.sent_bytes)) << "which goes on meanwhile";
}

TEST(ReductionCost, PowerSgdAndTopKSendTheirFactorsAndElements) {
  TimedPlan timed = timed_plan(ShardingStrategy::kNoShard, {1, 4, 0, 0}, 1, kNumel);
  timed.input.wire.compressed_shard_part = 1;
  timed.links.shard = links_of(1e-9, 1e-3);
  for (UnitShape& unit : timed.input.units) unit.groups[0].factored = {{1024, unit.groups[0].layout.numel() / 1024}};
  timed.input.wire.compression.method = PowerSgdConfig{.rank = 4};
  const CallCost factors = cost_of(timed);
  EXPECT_EQ(factors.sent_bytes, 2 * 6 * 1024 * 4);  // there are two all-reduces of shape [4, 1024]
  EXPECT_DOUBLE_EQ(factors.latency_s, 2 * 3 * 1e-3);
  timed.input.wire.compression.method = TopKConfig{.fraction = 0.01};
  EXPECT_EQ(cost_of(timed).sent_bytes, 3 * 8 * count_of(timed.input.units[1].groups[0], 0.01));
}

TEST(ReductionCost, EachMethodSendsTheBytesOfItsMessages) {
  TimedPlan timed = timed_plan(ShardingStrategy::kNoShard, {1, 4, 0, 0}, 1, kNumel);
  timed.input.wire.compressed_shard_part = 1;
  timed.links.shard = links_of(1e-9, 1e-3);
  const std::int64_t runs = kNumel / 256;
  const auto expect = [&](const CompressionMethod& method, std::int64_t bytes, int messages) {
    timed.input.wire.compression.method = method;
    const CallCost cost = cost_of(timed);
    EXPECT_EQ(cost.sent_bytes, bytes);
    EXPECT_DOUBLE_EQ(cost.latency_s, messages * 1e-3);
  };
  // Some methods have owners. A rank then sends 3/4 of a message to the other owners, and as an owner it sends its
  // quarter of the answer to 3 ranks. The other methods send a whole message to each of 3 ranks.
  expect(RandomKConfig{.fraction = 0.25}, 2 * 3 * kNumel / 4 / 4 * 4, 3);
  expect(SignMajorityConfig(), 2 * 3 * (4 + runs / 4 * 32), 3);
  expect(SignFeedbackConfig(), 3 * runs * 36, 3);
  expect(OneBitConfig(), 2 * 3 * (runs / 4 * 36), 3);
  expect(QsgdConfig{.levels = 1}, 3 * runs * (4 + 64), 3);
  expect(QsgdConfig{.levels = 7}, 3 * runs * (4 + 128), 3);
  expect(QsgdConfig{.levels = 8}, 3 * runs * (4 + 256), 3);
  expect(TernGradConfig(), 3 * runs * (4 + 64), 3);
}

TEST(ReductionCost, ReplicateAxisSendsOnlyTheShardsPart) {
  TimedPlan timed = timed_plan(ShardingStrategy::kHybridShard, {2, 4, 0, 0}, 1, kNumel);
  const auto cost = [&] {
    const MemoryPlan plan = timed.plan();
    return replicate_reduction_cost(plan, plan.units()[1].groups[0], timed.links.replicate);
  };
  EXPECT_EQ(cost().sent_bytes, kNumel / 4 * 4);  // half of a quarter of the elements, sent twice
  timed.input.placement = placement_of(ShardingStrategy::kHybridShard, true);
  EXPECT_EQ(cost().sent_bytes, kNumel / 4 * 2);
}

// There are two replicas of four ranks, and each rank has three of 24 microbatches. The sums of two subtrees are sent
// to all ranks, and the joined sums are gathered.
TEST(ReductionCost, SumsOfSubtreesGoOverBothAxes) {
  TimedPlan timed = timed_plan(ShardingStrategy::kHybridShard, {2, 4, 0, 0}, 1, kNumel);
  timed.input.wire.accumulation = 3;
  timed.input.wire.sync = GradientSync::kLastMicrobatch;
  timed.input.wire.reproducible = true;
  const MemoryPlan plan = timed.plan();
  ASSERT_EQ(plan.sums().block_sums, 2);
  const GroupShape& group = plan.units()[1].groups[0];
  const std::int64_t part = kNumel / 8 * 4;
  EXPECT_EQ(shard_reduction_cost(plan, group, timed.links.shard).sent_bytes, 2 * 2 * 3 * part + 3 * 2 * part);
  EXPECT_EQ(replicate_reduction_cost(plan, group, timed.links.replicate).sent_bytes, 2 * 4 * part + part);
}

}  // namespace
}  // namespace tessera::testing
