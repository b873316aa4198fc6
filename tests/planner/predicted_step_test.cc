// Tests the predicted time of a step: which communication is hidden behind compute, and which is exposed.

#include "planner/predicted_step.h"

#include <gtest/gtest.h>

#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

/// Returns links on which the gather of a unit of 4 MiB takes `seconds` on 4 ranks, and its reduction takes as long.
Links links_for(double seconds) { return links_of(seconds / (3.0 / 4 * (4 << 20))); }

TEST(PredictedStep, FreeLinksLeaveComputeUpdateAndRest) {
  for (const StrategyCase& strategy : all_strategies()) {
    for (const std::int64_t accumulation : {1, 2}) {
      TimedPlan timed = timed_plan(strategy, 3);
      timed.input.wire.accumulation = accumulation;
      const PredictedStep step = timed.predicted();
      EXPECT_EQ(step.compute_s, 12.0 * static_cast<double>(accumulation)) << strategy.name;
      EXPECT_EQ(step.rest_s, 0.5) << strategy.name;
      EXPECT_DOUBLE_EQ(step.seconds, step.compute_s + step.update_s + step.rest_s) << strategy.name;
      const Placement& placement = timed.input.placement;
      const int parts = (placement.optimizer.shard ? strategy.mesh.shard_size : 1) *
                        (placement.optimizer.replicate ? strategy.mesh.replicate_size : 1);
      EXPECT_DOUBLE_EQ(step.update_s, 3.0 / parts) << strategy.name;
      EXPECT_EQ(step.bound, StepBound::kCompute);
    }
  }
}

TEST(PredictedStep, StepWithoutComputeTakesTheWiresTime) {
  for (const StrategyCase& strategy : all_strategies()) {
    TimedPlan timed = timed_plan(strategy, 3);
    for (ProfileEntry& entry : timed.profile.entries) entry.seconds = 0;
    timed.profile.update_seconds = timed.profile.rest_seconds = 0;
    timed.links = {links_of(1e-9), links_of(0)};
    const PredictedStep shard = timed.predicted();
    EXPECT_NEAR(shard.seconds, shard.shard.transfer_s + shard.agreement_s, 1e-12) << strategy.name;
    EXPECT_NEAR(shard.shard.busy_s, shard.shard.transfer_s, 1e-12) << strategy.name;
    timed.links = {links_of(0), links_of(1e-9)};
    const PredictedStep replicate = timed.predicted();
    EXPECT_NEAR(replicate.seconds, replicate.replicate.transfer_s + replicate.agreement_s, 1e-12) << strategy.name;
    if (shard.shard.transfer_s > shard.agreement_s) {
      EXPECT_EQ(shard.bound, StepBound::kShardWire) << strategy.name;
    }
    if (replicate.replicate.transfer_s > replicate.agreement_s) {
      EXPECT_EQ(replicate.bound, StepBound::kReplicateWire) << strategy.name;
    }
  }
}

TEST(PredictedStep, WithoutPrefetchEveryGatherIsExposed) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardGradOp, {1, 4, 0, 0}, 4);
  timed.input.placement.prefetch = 0;
  timed.links.shard = links_for(0.5);
  const double root_s = 0.5 * timed.input.units[0].trainable_numel() / timed.input.units[1].trainable_numel();
  EXPECT_NEAR(timed.predicted().exposed_gather_s, root_s + 4 * 0.5, 1e-12);
}

// The numbers of bytes are correct for gathers of units and for gathers of updated values, on each axis by itself.
TEST(PredictedStep, GathersSendTheBytesOfTheirWireForm) {
  using enum WireForm;
  for (const ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kShardOptimizer}) {
    TimedPlan timed = timed_plan(kind, {1, 4, 0, 0}, 3);
    const auto sent_in = [&](WireForm form) {
      timed.input.wire.gathers = form;
      return static_cast<double>(timed.predicted().shard.sent_bytes);
    };
    const double plain = sent_in(kPlain), saved = plain - sent_in(kLossless);
    EXPECT_GT(saved, 0) << name_of(kind);
    EXPECT_NEAR((plain - sent_in(kInt8)) / saved, (1 - 260.0 / 1024) / (1 - 0.853), 0.001) << name_of(kind);
  }
  for (const StrategyCase& strategy : all_strategies()) {
    TimedPlan timed = timed_plan(strategy, 3);
    const PredictedStep plain = timed.predicted();
    timed.input.wire.replica_gathers = kLossless;
    const PredictedStep packed = timed.predicted();
    EXPECT_EQ(packed.shard.sent_bytes, plain.shard.sent_bytes) << strategy.name;
    const bool publishes = timed.input.placement.optimizer.replicate && strategy.mesh.replicate_size > 1;
    EXPECT_EQ(packed.replicate.sent_bytes < plain.replicate.sent_bytes, publishes) << strategy.name;
  }
}

TEST(PredictedStep, PrefetchHidesGathersBehindCompute) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard}) {
    TimedPlan timed = timed_plan(strategy, {1, 4, 0, 0}, 6);
    timed.input.placement.prefetch = 1;
    timed.profile.rest_seconds = 0;  // otherwise this time would hide the first unit's gather
    const double root_s = 0.5 * timed.input.units[0].trainable_numel() / timed.input.units[1].trainable_numel();
    timed.links.shard = links_for(0.5);
    EXPECT_NEAR(timed.predicted().exposed_gather_s, root_s, 1e-12);  // only the first unit's gather is exposed
    timed.links.shard = links_for(1.0);
    EXPECT_NEAR(timed.predicted().exposed_gather_s, 2 * root_s, 1e-12);
    timed.links.shard = links_for(1.5);
    EXPECT_GT(timed.predicted().exposed_gather_s, 6 * 0.5 - 1);
    timed.links.shard = links_for(0.5);
    timed.links.shard.gathers_in_background = false;  // a prefetch hides nothing if gathers do not run in background
    EXPECT_GT(timed.predicted().exposed_gather_s, 6 * 0.5);
  }
}

TEST(PredictedStep, MoreSlotsSaveGathers) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 6);
  timed.input.placement.prefetch = 1;
  const PredictedStep few = timed.predicted();
  timed.input.placement.prefetch = 6;
  const PredictedStep all = timed.predicted();
  EXPECT_EQ(few.shard.calls - all.shard.calls, 4);
}

TEST(PredictedStep, AccumulationMultipliesOnlyReductionsOfEachMicrobatch) {
  for (const StrategyCase& strategy : all_strategies()) {
    TimedPlan timed = timed_plan(strategy, 3);
    timed.links = {links_of(1e-9), links_of(1e-9)};
    const auto with = [&](std::int64_t accumulation, GradientSync sync) {
      timed.input.wire.accumulation = accumulation;
      timed.input.wire.sync = sync;
      return timed.predicted();
    };
    const PredictedStep one = with(1, GradientSync::kEachMicrobatch);
    const PredictedStep each = with(4, GradientSync::kEachMicrobatch), last = with(4, GradientSync::kLastMicrobatch);
    for (const PredictedStep& step : {each, last}) {
      EXPECT_EQ(step.compute_s, 4 * one.compute_s) << strategy.name;
      EXPECT_EQ(step.update_s, one.update_s) << strategy.name;
      EXPECT_EQ(step.rest_s, one.rest_s) << strategy.name;
      EXPECT_NEAR(step.agreement_s, one.agreement_s, 1e-12) << strategy.name;
    }
    const Placement& placement = timed.input.placement;
    if (!placement.parameters.shard && !placement.optimizer.shard) {  // only reductions take time
      EXPECT_EQ(each.sent_bytes(), 4 * one.sent_bytes()) << strategy.name;
      EXPECT_EQ(last.sent_bytes(), one.sent_bytes()) << strategy.name;
    }
    EXPECT_GE(each.sent_bytes(), last.sent_bytes()) << strategy.name;
  }
}

TEST(PredictedStep, PublishingOverlapsUpdatesAndTheNextForward) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardOptimizer, {1, 4, 0, 0}, 4);
  timed.profile.update_seconds = 4 * 4;  // the update of a block takes a second
  timed.links.shard = links_of(0);
  timed.links.shard.all_gather = links_for(0.75).all_gather;
  EXPECT_NEAR(timed.predicted().exposed_publish_s, 0, 0.01);
  // Four gathers follow each other, and the last gather ends after 1 + 4 x 3.5 seconds. The update takes 4 seconds.
  // Forward needs the last block after the root and three blocks, of one second each.
  timed.links.shard.all_gather = links_for(3.5).all_gather;
  EXPECT_NEAR(timed.predicted().exposed_publish_s, 1 + 4 * 3.5 - (4 + timed.profile.rest_seconds + 4), 0.02);
  timed.links.shard.all_gather = links_for(0.75).all_gather;
  timed.links.shard.gathers_in_background = false;
  EXPECT_NEAR(timed.predicted().exposed_publish_s, 4 * 0.75, 0.01);
}

TEST(PredictedStep, ReductionsThatLagAreExposedAtTheEnd) {
  TimedPlan timed = timed_plan(ShardingStrategy::kShardGradients, {1, 4, 0, 0}, 4);
  timed.links.shard.reduce_scatter = links_for(1.5).reduce_scatter;
  EXPECT_NEAR(timed.predicted().exposed_reduction_s, 0,
              0.01);  // a unit's backward takes 2 s, so the last block's reduction ends together with the root's
  timed.input.wire.reductions_ahead = 0;
  EXPECT_NEAR(timed.predicted().exposed_reduction_s, 4 * 1.5, 0.01);
  timed.input.wire.reductions_ahead = 1;
  timed.links.shard.reduce_scatter = links_for(3).reduce_scatter;
  EXPECT_NEAR(timed.predicted().exposed_reduction_s, 4 * 3 - 4 * 2, 0.02);
}

TEST(PredictedStep, RecomputedUnitIsGatheredOnce) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 5);
  timed.links.shard = links_of(1e-9);
  const PredictedStep plain = timed.predicted();
  std::vector<ProfileEntry> entries;
  for (const ProfileEntry& entry : timed.profile.entries) {
    if (entry.pass == RoundPass::kBackward) entries.push_back({entry.unit, RoundPass::kForward, 1});
    entries.push_back(entry);
  }
  timed.profile.entries = entries;
  const PredictedStep recomputed = timed.predicted();
  EXPECT_EQ(recomputed.compute_s, plain.compute_s + 6);
  EXPECT_EQ(recomputed.sent_bytes(), plain.sent_bytes());
}

TEST(PredictedStep, TransportTakesCoresFromCompute) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 4);
  timed.links.shard = links_for(0.5);
  const PredictedStep free = timed.predicted();
  timed.links.shard.cpu_s_per_byte = 0.5 * timed.links.shard.all_gather.beta_s_per_byte;
  const PredictedStep busy = timed.predicted();
  EXPECT_EQ(busy.compute_s, free.compute_s);
  EXPECT_GT(busy.stretch_s, 0);
  EXPECT_LE(busy.stretch_s, 0.5 * busy.shard.busy_s + 1e-9);
  EXPECT_GT(busy.seconds, free.seconds);
}

/// A gather takes longer while the rank computes than while the rank only waits for the gather.
TEST(PredictedStep, BytesMoveMoreSlowlyBesideCompute) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 4);
  timed.links.shard = links_for(1);
  timed.input.placement.prefetch = 0;
  const PredictedStep waited = timed.predicted();
  timed.links.shard.all_gather.busy_beta_s_per_byte = 3 * timed.links.shard.all_gather.beta_s_per_byte;
  EXPECT_EQ(timed.predicted().seconds, waited.seconds) << "nobody computes beside a gather";
  timed.links.shard = links_for(1);
  timed.input.placement.prefetch = 1;
  const PredictedStep hidden = timed.predicted();
  timed.links.shard.all_gather.busy_beta_s_per_byte = 3 * timed.links.shard.all_gather.beta_s_per_byte;
  const PredictedStep dragged = timed.predicted();
  EXPECT_GT(dragged.exposed_gather_s, hidden.exposed_gather_s);
  EXPECT_EQ(dragged.shard.transfer_s, hidden.shard.transfer_s);
}

/// Packing needs cores. It slows compute down only if all cores of the machine are busy.
TEST(PredictedStep, PackingTakesCoresFromCompute) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 4);
  timed.links.shard = links_for(0.5);
  timed.input.wire.gathers = WireForm::kLossless;
  const PredictedStep unmeasured = timed.predicted();
  timed.links.shard.coding.lossless_s_per_byte = 0.2 * timed.links.shard.all_gather.beta_s_per_byte;
  EXPECT_EQ(timed.predicted().seconds, unmeasured.seconds) << "a core is idle";
  timed.links.shard.coding.load = 1;
  const PredictedStep busy = timed.predicted();
  EXPECT_EQ(busy.compute_s, unmeasured.compute_s);
  EXPECT_GT(busy.stretch_s, 0);
  EXPECT_GT(busy.seconds, unmeasured.seconds);
}

TEST(PredictedStep, CompressionSavesTheWiresTime) {
  TimedPlan timed = timed_plan(ShardingStrategy::kNoShard, {1, 4, 0, 0}, 4);
  timed.links.shard = links_for(3);
  timed.input.wire.compressed_shard_part = 1;
  const PredictedStep plain = timed.predicted();
  timed.input.wire.compression = {WireForm::kInt8, WireForm::kInt8};
  const PredictedStep narrow = timed.predicted();
  EXPECT_NEAR(narrow.shard.transfer_s / plain.shard.transfer_s, 0.254, 0.001);
  EXPECT_LT(narrow.seconds, plain.seconds);
}

}  // namespace
}  // namespace tessera::testing
