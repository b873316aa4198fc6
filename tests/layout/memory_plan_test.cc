// Tests the plan of memory: how many buckets, slots and records a strategy needs, what is offloaded, and how much steps
// read and write.

#include "sharding/layout/plan/memory_plan.h"

#include <gtest/gtest.h>

#include "sharding/layout/plan/tier_choice.h"

namespace tessera {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

/// Returns a root and `blocks` units of `numel` fp32 parameters each, in `groups` equal groups.
PlanInput input_of(std::int64_t numel, std::int64_t blocks, MeshPosition mesh, int groups = 1) {
  PlanInput input;
  const auto unit = [&](std::int64_t unit_numel) {
    UnitShape shape;
    for (int g = 0; g < groups; ++g) {
      const std::int64_t group_numel = unit_numel / groups;
      shape.groups.push_back({DType::kF32, true, Layout::pack({&group_numel, 1}, mesh.world_size())});
    }
    return shape;
  };
  input.units.push_back(unit(256L * groups * mesh.world_size()));
  for (std::int64_t i = 0; i < blocks; ++i) input.units.push_back(unit(numel));
  input.placement = placement_of(ShardingStrategy::kFullShard, false);
  input.placement.mesh = mesh;
  return input;
}

TEST(MemoryPlan, SmallUnitsAreReducedWithALagAndLargeOnesAtOnce) {
  struct Case {
    std::int64_t bucket_bytes, lag;
  };
  // The plan has two more buckets for each unit by which reductions lag. The buckets for the lag have at most 8 MiB
  // together, and the lag is at most 3 units.
  for (const Case& c : {Case{kMiB / 4, 3}, Case{kMiB, 3}, Case{2 * kMiB, 2}, Case{4 * kMiB, 1}, Case{8 * kMiB, 0}}) {
    const MemoryPlan plan(input_of(c.bucket_bytes / 4, 12, {1, 2, 0, 0}));
    EXPECT_EQ(plan.sums().reduction_lag, c.lag) << c.bucket_bytes;
    EXPECT_EQ(plan.sums().shared_buckets, 1 + 2 * c.lag) << c.bucket_bytes;
    const std::int64_t root = plan.bucket_bytes_of(plan.units()[0]);
    EXPECT_EQ(plan.use()[MemoryCategory::kBuckets], root + (1 + 2 * c.lag) * c.bucket_bytes);
  }
}

TEST(MemoryPlan, BucketsAreNoMoreThanUnits) {
  EXPECT_EQ(MemoryPlan(input_of(kMiB / 16, 4, {1, 2, 0, 0})).sums().shared_buckets, 4);
}

TEST(MemoryPlan, ReductionsUnderWayAreNoMoreThanTransportsAllow) {
  for (int groups = 1; groups <= 20; ++groups) {
    const MemoryPlan plan(input_of(groups * 1024L, 30, {1, 2, 0, 0}, groups));
    EXPECT_LE(groups * plan.sums().units_under_way(), std::max<std::int64_t>(groups, MemoryPlan::kMostUnderWay))
        << groups;
  }
}

TEST(MemoryPlan, ReductionLagIsZeroOverTwoAxesOrAlone) {
  EXPECT_EQ(MemoryPlan(input_of(1024, 12, {2, 2, 0, 0})).sums().reduction_lag, 0);
  EXPECT_EQ(MemoryPlan(input_of(1024, 12, {1, 1, 0, 0})).sums().reduction_lag, 0);
}

TEST(MemoryPlan, SecondCopyTakesTheParametersOfAHostAndInt8AQuarterOfThem) {
  constexpr std::int64_t kNumel = 8 * 4096, kBlocks = 5;
  PlanInput input = input_of(kNumel, kBlocks, {1, 8, 0, 0});
  const MemoryPlan without(input);
  input.placement.secondary = {.ranks = 4, .form = SecondaryForm::kPlain};
  const MemoryPlan plain(input);
  input.placement.secondary.form = SecondaryForm::kInt8;
  const MemoryPlan rounded(input);
  const auto more = [&](const MemoryPlan& plan, MemoryCategory category) {
    return plan.use()[category] - without.use()[category];
  };
  EXPECT_FALSE(without.has_secondary());
  EXPECT_EQ(more(plain, MemoryCategory::kParameters), 4 * kBlocks * kNumel / 4) << "the root is gathered once";
  EXPECT_EQ(more(plain, MemoryCategory::kSlots), 0);
  // Parts of 512 and 8192 elements have 2 and 32 scales of 4 bytes, and end on cache lines.
  EXPECT_EQ(more(rounded, MemoryCategory::kParameters), (512 + 64) + kBlocks * (8192 + 128));
  EXPECT_EQ(more(rounded, MemoryCategory::kSlots), 4 * (8192 + 128));
  input.units.resize(1);
  EXPECT_TRUE(MemoryPlan(input).has_secondary());
  input.placement.secondary.form = SecondaryForm::kPlain;
  EXPECT_FALSE(MemoryPlan(input).has_secondary()) << "the root alone is gathered once";
  input.placement.shared = true;
  EXPECT_FALSE(MemoryPlan(input).has_secondary()) << "ranks that share one copy gather nothing";
}

// Records have 64 KiB each, with two moments of 31 blocks of 256 elements. The last record has fewer blocks.
TEST(MemoryPlan, OpenQueueDepthHoldsTheRecordsOfAUnit) {
  struct Case {
    std::int64_t block_records, depth;
  };
  for (const Case& c : {Case{3, kQueueDepth}, Case{8, 8}, Case{13, 13}, Case{16, 16}, Case{40, kMostQueueDepth / 2}}) {
    PlanInput input = input_of(c.block_records * 7936 - 1024, 4, {1, 2, 0, 0});
    input.placement.mesh = {1, 1, 0, 0};
    input.tiers.moments.tier = Tier::kNvme;
    input.tiers.record_bytes = 64 << 10;
    EXPECT_EQ(MemoryPlan(input).records().queue_depth, kQueueDepth) << "all are read ahead behind backward";
    input.update.in_backward = true;
    const MemoryPlan plan(input);
    EXPECT_EQ(plan.most_records_of_a_unit(), c.block_records);
    EXPECT_EQ(plan.records().queue_depth, c.depth);
    const std::int64_t all = plan.records().states.records;
    EXPECT_EQ(plan.records().states.slots, std::min(2 * c.depth + 1, all));
    input.tiers.queue_depth = 5;
    EXPECT_EQ(MemoryPlan(input).records().queue_depth, 5);
  }
}

TEST(MemoryPlan, GradientsOnDiskKeepSlotsAndTheRootsGradientsInMemory) {
  PlanInput input = input_of(kMiB, 12, {1, 2, 0, 0});
  input.tiers.moments.tier = Tier::kNvme;
  input.tiers.is_durable = true;
  const MemoryPlan in_memory(input);
  input.tiers.gradients = Tier::kNvme;
  const MemoryPlan on_disk(input);
  const std::int64_t root = on_disk.sum_bytes_of(input.units[0]), unit = on_disk.sum_bytes_of(input.units[1]);
  EXPECT_EQ(in_memory.use()[MemoryCategory::kGradients], root + 12 * unit);
  EXPECT_EQ(on_disk.use()[MemoryCategory::kGradients], root);
  EXPECT_EQ(on_disk.records().gradients.memory_bytes(), (on_disk.sums().units_under_way() + 2) * unit);
  EXPECT_EQ(on_disk.records().disk.bytes - in_memory.records().disk.bytes, 12 * unit);
  EXPECT_EQ(on_disk.records().disk.durable_bytes, in_memory.records().disk.durable_bytes)
      << "no commit needs gradients";
}

// Up to three sums wait at a time while eight microbatches are added up. If ranks reduce each microbatch, one of the
// three lies in the gradient's own memory.
TEST(MemoryPlan, ReproducibleCountsTheSumsThatWaitInTheTree) {
  const auto added = [](MeshPosition mesh, std::int64_t accumulation, GradientSync sync) {
    PlanInput input = input_of(kMiB, 12, mesh);
    input.wire.accumulation = accumulation;
    input.wire.sync = sync;
    const MemoryPlan without(input);
    input.wire.reproducible = true;
    const MemoryPlan with(input);
    EXPECT_EQ(with.use().total() - without.use().total(), with.waiting_bytes());
    EXPECT_EQ(with.use()[MemoryCategory::kStaging] - without.use()[MemoryCategory::kStaging], with.waiting_bytes());
    EXPECT_EQ(with.to_table().find("reproducible: ") != std::string::npos, with.waiting_bytes() > 0);
    EXPECT_EQ(without.waiting_bytes(), 0);
    return with.waiting_bytes();
  };
  constexpr GradientSync kEach = GradientSync::kEachMicrobatch, kLast = GradientSync::kLastMicrobatch;
  const std::int64_t whole = 4 * (512 + 12 * kMiB), alone = 4 * (256 + 12 * kMiB);  // these are bytes of gradients
  EXPECT_EQ(added({1, 2, 0, 0}, 8, kLast), 3 * whole);
  EXPECT_EQ(added({1, 2, 0, 0}, 8, kEach), 2 * whole / 2);
  EXPECT_EQ(added({1, 2, 0, 0}, 2, kEach), 0);
  EXPECT_EQ(added({1, 1, 0, 0}, 8, kEach), 3 * alone);
  EXPECT_EQ(added({1, 1, 0, 0}, 8, kLast), 3 * alone);
  EXPECT_EQ(added({1, 2, 0, 0}, 1, kEach), 0);
  EXPECT_EQ(added({1, 2, 0, 0}, 5, kEach), 1 * whole / 2);
}

// Three ranks have four of twelve microbatches each. Every rank's run is one node of the tree. If each has six of
// eighteen, the second rank's run consists of two nodes: microbatches 6 to 7, and 8 to 11.
TEST(MemoryPlan, ReproducibleCountsTheSumsOfSubtreesThatRanksSend) {
  PlanInput input = input_of(kMiB, 12, {1, 3, 0, 0});
  input.wire.accumulation = 4;
  input.wire.sync = GradientSync::kLastMicrobatch;
  input.wire.reproducible = true;
  EXPECT_EQ(MemoryPlan(input).sums().block_sums, 0);
  EXPECT_EQ(MemoryPlan(input).block_exchange_numel(), 0);
  input.wire.accumulation = 6;
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.sums().block_sums, 2);
  EXPECT_EQ(plan.sums().waiting_sums, 3) << "rank 1 keeps the sum of two while it adds four";
  EXPECT_EQ(plan.sums().end_lag, 0);
  std::int64_t sent = 0, kept = 0;
  for (const UnitShape& unit : input.units) {
    sent += 2 * 2 * 4 * unit.trainable_numel() / 3;
    kept += 3 * 4 * unit.trainable_numel();
  }
  EXPECT_EQ(plan.block_bytes_of_step(), sent);
  EXPECT_EQ(plan.block_exchange_numel(), 2 * 2 * 3 * plan.sums().block_piece_numel) << "sent and received";
  EXPECT_EQ(plan.use()[MemoryCategory::kStaging], kept + 4 * plan.block_exchange_numel());
  EXPECT_EQ(plan.sums().block_piece_numel % 256, 0);
  EXPECT_NE(plan.to_table().find("each rank sends 2 sums of each gradient"), std::string::npos) << plan.to_table();
  input.placement = placement_of(ShardingStrategy::kNoShard, false);
  const MemoryPlan replicated(input);
  EXPECT_EQ(replicated.block_bytes_of_step(), sent + sent / 2) << "what was joined is sent on";
  EXPECT_EQ(replicated.block_exchange_numel(), (2 * 2 + 1) * 3 * replicated.sums().block_piece_numel);
}

TEST(MemoryPlan, BackupsOfMicrobatchesCountTheirWholeGradientsAndWhatRanksSend) {
  PlanInput input = input_of(kMiB, 12, {1, 3, 0, 0});
  input.wire.accumulation = 4;
  input.wire.sync = GradientSync::kLastMicrobatch;
  input.wire.reproducible = true;
  input.wire.longest_run = 8;
  const MemoryPlan without(input);
  input.wire.backups = 2;
  const MemoryPlan with(input);
  std::int64_t whole = 0;
  for (const UnitShape& unit : input.units) whole += 4 * unit.trainable_numel();
  EXPECT_EQ(with.waiting_bytes() - without.waiting_bytes(), 2 * whole);
  EXPECT_EQ(with.first_backup(), without.sums().waiting_sums);
  EXPECT_EQ(with.sums().block_sums, without.sums().block_sums + 2);
  EXPECT_EQ(with.order().most_rounds(), 10);
  EXPECT_EQ(with.use()[MemoryCategory::kStaging], with.waiting_bytes() + 4 * with.block_exchange_numel());
  EXPECT_EQ(without.to_table().find("backups: "), std::string::npos);
  EXPECT_NE(with.to_table().find("make up to 4 microbatches of a slow rank again, up to 2 each"), std::string::npos)
      << with.to_table();
}

TEST(MemoryPlan, TableOfCommonParametersSaysWhatIsKept) {
  PlanInput input = input_of(kMiB, 12, {1, 4, 0, 0});
  input.placement = placement_of(ShardingStrategy::kShardOptimizer, false);
  const auto table_has = [&](const std::string& text) {
    return MemoryPlan(input).to_table().find(text) != std::string::npos;
  };
  EXPECT_FALSE(table_has("asynchronous: "));
  input.update.outer.type = SyncType::kAsynchronous;
  const std::string shard = std::to_string(4 * MemoryPlan(input).passes().outer.part) + " bytes) are this rank's shard";
  EXPECT_TRUE(table_has(shard)) << MemoryPlan(input).to_table();
  EXPECT_FALSE(table_has("means of squares") || table_has("record_order") || table_has("play_order"));
  input.update.outer.asynchronous.delay_compensation = {.lambda = 1, .adaptive = true};
  input.update.outer.asynchronous.record_order = "order.jsonl";
  input.update.outer.asynchronous.play_order = "order.jsonl";
  EXPECT_TRUE(table_has("means of squares") && table_has("play_order: a rank keeps 8 bytes"));
  EXPECT_TRUE(table_has("writes " + std::to_string(2 * 4 * std::ssize(input.units)) + " lines a step"));
  EXPECT_FALSE(table_has("whole shards"));
  input.update.twice = true;  // lamb
  EXPECT_TRUE(table_has("whole shards: a push updates each of " + std::to_string(std::ssize(input.units)) + " groups"));
  EXPECT_TRUE(table_has("writes " + std::to_string(2 * std::ssize(input.units)) + " lines a step"));
  input.update.twice = false;
  input.update.outer = {};
  input.update.outer.type = SyncType::kHogwild;
  EXPECT_TRUE(table_has("own states of the parts of other ranks"));
  input.update.outer.asynchronous.states = StateSharing::kShared;
  EXPECT_TRUE(table_has("and one set of states"));
}

TEST(MemoryPlan, BackgroundReductionsLagByTheGivenNumberOfUnits) {
  const auto plan_of = [](MeshPosition mesh, std::optional<std::int64_t> ahead, bool accumulates = false) {
    PlanInput input = input_of(64 * kMiB, 12, mesh);
    input.wire.reduces_in_background = true;
    input.wire.reductions_ahead = ahead;
    input.wire.accumulation = accumulates ? 2 : 1;
    return MemoryPlan(std::move(input));
  };
  for (const std::int64_t ahead : {0, 1, 2, 5}) {
    const MemoryPlan plan = plan_of({1, 2, 0, 0}, ahead), adds = plan_of({1, 2, 0, 0}, ahead, true);
    EXPECT_EQ(plan.sums().end_lag, ahead);
    EXPECT_EQ(plan.sums().shared_buckets, 1 + ahead);
    EXPECT_EQ(adds.use()[MemoryCategory::kStaging], (1 + ahead) * adds.sums().scratch_numel * 4);
    // The sum over the second axis begins one unit later than the sum over the first.
    const MemoryPlan two_axes = plan_of({2, 2, 0, 0}, ahead);
    EXPECT_EQ(two_axes.sums().reduction_lag, ahead > 0 ? 1 : 0);
    EXPECT_EQ(two_axes.sums().end_lag, ahead > 0 ? ahead + 1 : 0);
  }
  EXPECT_EQ(plan_of({1, 2, 0, 0}, std::nullopt).sums().end_lag, 1);
  EXPECT_EQ(plan_of({1, 1, 0, 0}, 3).sums().end_lag, 0);
  PlanInput replicated = input_of(64 * kMiB, 12, {1, 2, 0, 0});
  replicated.placement = placement_of(ShardingStrategy::kNoShard, false);
  replicated.wire.reduces_in_background = true;
  EXPECT_EQ(MemoryPlan(replicated).sums().end_lag, MemoryPlan::kMostUnderWay - 1);  // this lag costs no memory
}

TEST(MemoryPlan, ReductionsAheadSetTheLagOnOneHost) {
  for (const std::int64_t ahead : {0, 1, 2, 5}) {
    PlanInput input = input_of(64 * kMiB, 12, {1, 2, 0, 0});
    input.wire.reductions_ahead = ahead;
    const MemoryPlan plan(input);
    EXPECT_EQ(plan.sums().end_lag, ahead);
    EXPECT_EQ(plan.sums().reduction_lag, (ahead + 1) / 2);
  }
}

TEST(MemoryPlan, GpuReductionsLagByOneUnitWhateverTheirSize) {
  for (const std::int64_t bucket_bytes : {kMiB / 4, 512 * kMiB}) {
    PlanInput input = input_of(bucket_bytes / 4, 12, {1, 2, 0, 0});
    input.placement.is_queued = true;
    const MemoryPlan plan(input);
    EXPECT_EQ(plan.sums().reduction_lag, 0);
    EXPECT_EQ(plan.sums().end_lag, 1);
    EXPECT_EQ(plan.sums().shared_buckets, 2);
  }
  // The sum over the second axis begins one unit after that over the first, and ends one unit later.
  PlanInput input = input_of(1024, 12, {2, 2, 0, 0});
  input.placement.is_queued = true;
  EXPECT_EQ(MemoryPlan(input).sums().reduction_lag, 1);
  EXPECT_EQ(MemoryPlan(input).sums().end_lag, 2);
  EXPECT_EQ(MemoryPlan(input).sums().shared_buckets, 3);
  input.placement.mesh = {1, 1, 0, 0};
  EXPECT_EQ(MemoryPlan(input).sums().end_lag, 0);
}

TEST(MemoryPlan, CompressedSumsOfAGpuGoThroughItsHostsMemory) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  input.placement.is_queued = true;
  const MemoryPlan plain(input);
  input.wire.compression = {.gradients = WireForm::kInt8, .error_feedback = true};
  input.wire.compressed_shard_part = 1;
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.sums().reduction_lag, 1);
  EXPECT_EQ(plan.sums().end_lag, 2);
  // A slot has an int8 message for each rank, with a scale for each 256 elements, and the fp32 sum of this rank's half.
  constexpr std::int64_t kMessages = kMiB + 4 * kMiB / 256, kSum = 2 * kMiB;
  EXPECT_EQ(plan.shard_sums_on_host().bytes(), 3 * (kMessages + kSum));  // 3 units are under way at a time
  EXPECT_EQ(plan.replicate_sums_on_host().bytes(), 0);
  const std::int64_t kept = 4 * plan.sums().kept_gradient_numel;
  EXPECT_GT(kept, 4 * 4 * kMiB);
  EXPECT_EQ(plan.use()[MemoryCategory::kHostRecords], plan.shard_sums_on_host().bytes() + kept);
  EXPECT_EQ(plan.use()[MemoryCategory::kFeedback], 0);
  EXPECT_EQ(plan.use().limited(), plain.use().limited() + 4 * kMiB);  // a bucket more, as a unit is under way longer
  input.wire.reduce = DType::kBF16;
  EXPECT_EQ(MemoryPlan(input).shard_sums_on_host().slot_bytes, kMessages + kSum);
  // The sum of a bf16 contribution that is not encoded needs additional fp32 memory. An fp32 contribution does not.
  input.wire.compression = {.gradients = WireForm::kLossless};
  EXPECT_EQ(MemoryPlan(input).shard_sums_on_host().slot_bytes, 2 * kMiB + kSum);
  input.wire.reduce = DType::kF32;
  EXPECT_EQ(MemoryPlan(input).shard_sums_on_host().slot_bytes, 4 * kMiB);
  input.placement.is_queued = false;
  EXPECT_EQ(MemoryPlan(input).shard_sums_on_host().bytes(), 0);
}

TEST(MemoryPlan, GathersOfAGpuInAnotherFormHaveASlotForEachGroupOfTheUnitsAhead) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0}, /*groups=*/2);
  input.placement.is_queued = true;
  const MemoryPlan plain(input);
  EXPECT_EQ(plain.gathers_on_host().bytes(), 0);
  input.wire.gathers = WireForm::kInt8;
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.gathers_on_host().slots, 2 * 2);
  EXPECT_EQ(plan.gathers_on_host().slot_bytes, 4 * kMiB / 2);
  EXPECT_EQ(plan.use()[MemoryCategory::kHostRecords], plan.gathers_on_host().bytes());
  EXPECT_EQ(plan.use().limited(), plain.use().limited());
  input.placement.prefetch = 100;
  EXPECT_EQ(MemoryPlan(input).gathers_on_host().slots, 5 * 2);
  input.placement = placement_of(ShardingStrategy::kNoShard, false);  // nothing is gathered
  EXPECT_EQ(MemoryPlan(input).gathers_on_host().bytes(), 0);
}

TEST(MemoryPlan, GathersOverReplicasOfAGpuHaveASlotForAllThatIsGathered) {
  PlanInput input = input_of(kMiB, 4, {2, 2, 0, 0});
  input.placement.is_queued = true;
  input.wire.replica_gathers = WireForm::kLossless;
  input.placement = placement_of(ShardingStrategy::kHybridShard, true);
  EXPECT_EQ(MemoryPlan(input).replica_gathers_on_host().slot_bytes, 4 * kMiB / 2) << "a shard";
  constexpr AxisPlacement kOverReplicas{.replicate = true};
  input.placement = Placement{{}, kOverReplicas, {.shard = true, .replicate = true, .replicate_first = true}};
  EXPECT_EQ(MemoryPlan(input).replica_gathers_on_host().slot_bytes, 4 * kMiB) << "the whole buffer";
}

TEST(MemoryPlan, CompressedOuterGradientsOfAGpuHaveASlotForEachSumUnderWay) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  input.placement.is_queued = true;
  input.placement.replicas = 2;
  input.update.outer.type = SyncType::kDiloco;
  input.update.outer.every = 4;
  const MemoryPlan plain(input);
  EXPECT_EQ(plain.outer_sums_on_host().bytes(), 0);
  input.wire.compression = {.gradients = WireForm::kInt8, .axes = CompressedAxes::kReplicate};
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.outer_sums_on_host().slots, 1);
  const std::int64_t part = owned(input.placement.optimizer, input.placement.mesh, kMiB).numel;
  EXPECT_EQ(plan.outer_sums_on_host().slot_bytes, part + 4 * part / 256 + 4 * part);  // an int8 message, and the sum
  EXPECT_EQ(plan.use()[MemoryCategory::kHostRecords], plan.outer_sums_on_host().bytes());
  EXPECT_EQ(plan.use().limited(), plain.use().limited());
  input.update.outer.type = SyncType::kStreamingDiloco;
  input.update.outer.fragments = 2;
  EXPECT_EQ(MemoryPlan(input).outer_sums_on_host().slots,
            static_cast<std::int64_t>((input.units.size() + 1) / 2));  // each unit has one group
  input.placement.is_queued = false;
  EXPECT_EQ(MemoryPlan(input).outer_sums_on_host().bytes(), 0);
}

TEST(MemoryPlan, EveryUnitUnderWayHasItsScratch) {
  PlanInput input = input_of(kMiB / 4, 12, {1, 2, 0, 0});
  input.wire.accumulation = 2;
  const MemoryPlan plan(input);
  // each unit of lag takes two buckets of 1 MiB and two pieces of scratch of 1/2 MiB
  EXPECT_EQ(plan.sums().reduction_lag, 2);
  EXPECT_EQ(plan.use()[MemoryCategory::kStaging], 5 * kMiB / 2);
}

TEST(MemoryPlan, ReplicatedGradientsNeedNoBucketsToBeReducedLater) {
  PlanInput input = input_of(64 * kMiB, 12, {1, 2, 0, 0});
  input.placement = placement_of(ShardingStrategy::kNoShard, false);
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.sums().bucket_mode, BucketMode::kInPlace);
  EXPECT_EQ(plan.sums().reduction_lag, 7);
  EXPECT_EQ(plan.use()[MemoryCategory::kBuckets], 0);
}

PlanInput updated_in_backward(PlanInput input) {
  input.update.in_backward = true;
  return input;
}

TEST(MemoryPlan, UpdatesInBackwardKeepSumsOfTheUnitsUnderWay) {
  for (const std::int64_t numel : {1024L, 8L << 20}) {  // small units have a lag, and large units have none
    for (const int ranks : {1, 2, 4}) {
      const PlanInput input = updated_in_backward(input_of(numel, 30, {1, ranks, 0, 0}));
      const MemoryPlan plan(input);
      const std::int64_t part = numel / ranks * 4;
      EXPECT_EQ(plan.sums().sum_bytes, part);
      EXPECT_EQ(plan.sums().shared_sums, 1 + plan.sums().end_lag);
      const std::int64_t notes = plan.sums().units_under_way() * plan.sums().notes_numel * 4;
      EXPECT_EQ(plan.use()[MemoryCategory::kGradients],
                plan.sum_bytes_of(input.units[0]) + plan.sums().shared_sums * part + notes);
    }
  }
}

TEST(MemoryPlan, UsageNotesCountTowardsReductionsUnderWay) {
  for (int groups = 1; groups <= 20; ++groups) {
    const MemoryPlan plan(updated_in_backward(input_of(groups * 1024L, 30, {1, 2, 0, 0}, groups)));
    EXPECT_LE((groups + 1) * plan.sums().units_under_way(),
              std::max<std::int64_t>(groups + 1, MemoryPlan::kMostUnderWay));
  }
}

PlanInput with_moments_on_disk(PlanInput input, std::int64_t record_bytes, std::int64_t cache_bytes, double fraction) {
  input.tiers.moments = {Tier::kNvme, fraction};
  input.tiers.record_bytes = record_bytes;
  input.tiers.cache_bytes = cache_bytes;
  input.tiers.queue_depth = 2;
  return input;
}

TEST(MemoryPlan, MomentsOnDiskLeaveOnlySlotsInMemory) {
  const PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  const MemoryUse all = MemoryPlan(input).use();
  const MemoryPlan plan(with_moments_on_disk(input, 256 << 10, 0, 1.0));
  EXPECT_EQ(plan.use()[MemoryCategory::kOptimizer], 0);
  EXPECT_GE(plan.records().disk.bytes, all[MemoryCategory::kOptimizer]);
  EXPECT_LT(plan.records().disk.bytes,
            all[MemoryCategory::kOptimizer] + plan.records().states.records * RecordLayout::kPage);
  EXPECT_EQ(plan.records().states.slots, 5);  // one used, two read in advance, two being written
  EXPECT_EQ(plan.use()[MemoryCategory::kRecords], 5 * plan.records().states.record_bytes);
  for (const MemoryCategory same :
       {MemoryCategory::kParameters, MemoryCategory::kGradients, MemoryCategory::kBuckets}) {
    EXPECT_EQ(plan.use()[same], all[same]);
  }
}

TEST(MemoryPlan, FractionOnDiskLeavesTheRestInMemory) {
  const PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  const std::int64_t all = MemoryPlan(input).use()[MemoryCategory::kOptimizer];
  for (const double fraction : {0.25, 0.5, 0.75}) {
    const MemoryPlan plan(with_moments_on_disk(input, 16 << 10, 0, fraction));
    const auto in_memory = static_cast<double>(plan.use()[MemoryCategory::kOptimizer]);
    EXPECT_NEAR(in_memory, (1 - fraction) * static_cast<double>(all), 0.02 * static_cast<double>(all)) << fraction;
  }
}

TEST(MemoryPlan, StepReadsOnlyRecordsThatCacheAndSlotsLack) {
  const PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  const MemoryPlan without(with_moments_on_disk(input, 256 << 10, 0, 1.0));
  const MemoryPlan with(with_moments_on_disk(input, 256 << 10, 6 * without.records().states.record_bytes, 1.0));
  EXPECT_EQ(without.records().states.cached, 0);
  EXPECT_EQ(with.records().states.cached, 6);
  EXPECT_EQ(with.use()[MemoryCategory::kRecords], 11 * with.records().states.record_bytes);
  for (const MemoryPlan* plan : {&without, &with}) {
    EXPECT_EQ(plan->records().disk.written_in_two_steps, 2 * plan->records().disk.bytes);
    EXPECT_LT(plan->records().disk.read_in_two_steps, plan->records().disk.written_in_two_steps);
  }
  EXPECT_LT(with.records().disk.read_in_two_steps, without.records().disk.read_in_two_steps);
}

// Frozen parameters are read only for gathers.
TEST(MemoryPlan, ParametersThatTrainAreCachedBeforeFrozenOnes) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  for (const std::size_t frozen : {1, 3}) input.units[frozen].groups[0].trainable = false;
  input.tiers.parameters = {Tier::kNvme, 1.0};
  input.tiers.record_bytes = 256 << 10;
  const MemoryPlan none(input);
  const std::int64_t record_bytes = none.records().parameters.record_bytes, records = none.records().parameters.records;
  for (const std::int64_t cached : {records / 4, records - 3}) {
    input.tiers.cache_bytes = cached * record_bytes;
    const MemoryPlan plan(input);
    const EvenSpread cache = plan.records().parameters.cache();
    const std::int64_t trains = plan.records().parameters.cached_first;
    EXPECT_GT(trains, records / 4);
    EXPECT_LT(trains, records - 3);
    EXPECT_EQ(cache.chosen_before(records), cached);
    EXPECT_EQ(cache.chosen_before(trains), std::min(trains, cached));
    EXPECT_LT(plan.records().disk.read_in_two_steps, none.records().disk.read_in_two_steps);
  }
}

TEST(MemoryPlan, GpuMomentsInFilesUseSlotsOnHostAndDevice) {
  PlanInput input = with_moments_on_disk(input_of(kMiB, 4, {1, 2, 0, 0}), 256 << 10, 0, 1.0);
  const MemoryPlan of_cpu(input);
  input.placement.is_queued = true;
  const MemoryPlan plan(input);
  const RecordPool& pool = plan.records().states;
  EXPECT_EQ(pool.device_slots, 5);  // one updated, two being copied to the GPU, two being copied back
  EXPECT_EQ(pool.slots, 9);         // the device's five, two read in advance, two being written
  EXPECT_EQ(plan.use()[MemoryCategory::kRecords], 5 * pool.record_bytes);
  EXPECT_EQ(plan.use()[MemoryCategory::kHostRecords], 9 * pool.record_bytes);
  EXPECT_EQ(plan.use().limited(), plan.use().total() - 9 * pool.record_bytes);
  EXPECT_EQ(plan.use()[MemoryCategory::kOptimizer], 0);
  EXPECT_EQ(plan.records().disk.bytes, of_cpu.records().disk.bytes);
  EXPECT_EQ(plan.records().streamed_bytes, plan.records().disk.bytes);
  EXPECT_EQ(of_cpu.records().streamed_bytes, 0);
  EXPECT_EQ(of_cpu.use().limited(), of_cpu.use().total());
  EXPECT_EQ(plan.records_on_disk(), pool.records);
}

TEST(MemoryPlan, GpuMomentsOnTheHostAreAllInPinnedMemory) {
  PlanInput input = with_moments_on_disk(input_of(kMiB, 4, {1, 2, 0, 0}), 256 << 10, 0, 0.5);
  input.placement.is_queued = true;
  const MemoryPlan in_files(input);
  input.tiers.moments.tier = Tier::kHost;
  const MemoryPlan plan(input);
  EXPECT_EQ(plan.use()[MemoryCategory::kHostRecords], in_files.records().disk.bytes);
  EXPECT_EQ(plan.records().streamed_bytes, in_files.records().disk.bytes);
  EXPECT_EQ(plan.use().limited(), in_files.use().limited());
  EXPECT_EQ(plan.records().disk, DiskUse{});
  EXPECT_EQ(plan.records_on_disk(), 0);
}

/// A plan of updates on the CPU has gradients and parameters in pinned memory instead of slots on the GPU.
TEST(MemoryPlan, StatesUpdatedByTheCpuNeedNoGpuSlots) {
  PlanInput input = with_moments_on_disk(input_of(kMiB, 4, {1, 2, 0, 0}), 256 << 10, 0, 0.5);
  input.placement.is_queued = true;
  input.tiers.moments.tier = Tier::kHost;
  const MemoryPlan streamed(input);
  input.tiers.step = OffloadedStep::kCpu;
  const MemoryPlan plan(input);
  std::int64_t elements = 0, parameter_bytes = 0;
  for (const UnitShape& unit : input.units) {
    for (const GroupShape& group : unit.groups) {
      const RecordLayout records = plan.records_of(group);
      elements += records.numel() - records.before_records();
      parameter_bytes += (records.numel() - records.before_records()) * static_cast<std::int64_t>(size_of(group.dtype));
    }
  }
  EXPECT_GT(elements, 0);
  EXPECT_TRUE(plan.passes().steps_on_host);
  EXPECT_EQ(plan.records().streamed_bytes, 0);
  EXPECT_EQ(plan.passes().host_step.to_gpu, parameter_bytes);
  EXPECT_EQ(plan.passes().host_step.to_host, 4 * elements + parameter_bytes)
      << "split masters, or fp32 ones, need parameters";
  EXPECT_EQ(plan.use()[MemoryCategory::kRecords], 0);
  EXPECT_EQ(plan.use()[MemoryCategory::kHostRecords],
            streamed.records().streamed_bytes + 4 * elements + parameter_bytes);
  EXPECT_FALSE(streamed.passes().steps_on_host);
  EXPECT_EQ(streamed.passes().host_step, HostStepBytes{});
}

TEST(MemoryPlan, StatesThatFitTheSlotsAreNotReadAgain) {
  const MemoryPlan plan(with_moments_on_disk(input_of(1024, 1, {1, 2, 0, 0}), 4 << 20, 0, 1.0));
  EXPECT_EQ(plan.records().states.slots, plan.records().states.records);
  EXPECT_EQ(plan.records().disk.read_in_two_steps, 0);
}

TEST(MemoryPlan, LatePublicationNeedsWholeParametersUpdatedElsewhere) {
  const auto is_behind = [](const auto& change, bool gathers_in_background = true) {
    PlanInput input = input_of(1024, 2, {1, 2, 0, 0});
    input.placement = placement_of(ShardingStrategy::kShardOptimizer, false);
    change(input);
    return MemoryPlan(std::move(input)).publishes_behind(gathers_in_background);
  };
  EXPECT_TRUE(is_behind([](PlanInput&) {}));
  EXPECT_TRUE(is_behind([](PlanInput& input) { input.update.in_backward = true; }));
  EXPECT_FALSE(is_behind([](PlanInput&) {}, /*gathers_in_background=*/false));
  EXPECT_FALSE(is_behind([](PlanInput& input) { input.update.checks_values = true; }));
  EXPECT_FALSE(is_behind([](PlanInput& input) { input.placement.is_queued = true; }));
  EXPECT_FALSE(is_behind([](PlanInput& input) { input.update.outer.type = SyncType::kDiloco; }));
  EXPECT_FALSE(is_behind([](PlanInput& input) { input.placement = share_parameters(input.placement); }));
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard})
    EXPECT_FALSE(is_behind([&](PlanInput& input) { input.placement = placement_of(kind, false); }));
}

TEST(MemoryPlan, AutoPutsAsLittleOnDiskAsTheLimitAllows) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  for (UnitShape& unit : input.units) {
    for (GroupShape& group : unit.groups) group.dtype = DType::kBF16;
  }
  input.tiers.record_bytes = 16 << 10;
  input.tiers.queue_depth = 2;
  const auto total = [&](OffloadedState masters, OffloadedState moments) {
    PlanInput chosen = input;
    chosen.tiers.masters = masters, chosen.tiers.moments = moments;
    return MemoryPlan(chosen).use().total();
  };
  const OffloadedState memory, disk{Tier::kNvme, 1.0};
  const std::int64_t most = total(memory, memory), least = total(disk, disk);
  PlanInput automatic = input;
  automatic.tiers.masters.tier = automatic.tiers.moments.tier = Tier::kAuto;
  for (std::int64_t limit = least; limit <= most; limit += (most - least) / 16) {
    const OffloadConfig chosen = with_tiers_chosen(automatic, limit).tiers;
    EXPECT_LE(total(chosen.masters, chosen.moments), limit);
    EXPECT_TRUE(chosen.masters.tier == Tier::kMemory || chosen.moments == disk) << "moments go first";
    // The plan would not fit if a little less state were on disk.
    OffloadedState masters = chosen.masters, moments = chosen.moments;
    OffloadedState& last = masters.tier == Tier::kNvme ? masters : moments;
    if (last.tier == Tier::kMemory) continue;
    last.fraction -= 1.0 / 256;
    if (last.fraction == 0) last = memory;
    EXPECT_GT(total(masters, moments), limit);
  }
  const OffloadConfig all = with_tiers_chosen(automatic, most).tiers;
  EXPECT_EQ(all.masters, memory);
  EXPECT_EQ(all.moments, memory);
  const OffloadConfig none = with_tiers_chosen(automatic, least - 1).tiers;
  EXPECT_EQ(none.masters, disk);
  EXPECT_EQ(none.moments, disk);
}

TEST(MemoryPlan, AutoOnAGpuMovesMastersAndMomentsOfTheSameElements) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  for (UnitShape& unit : input.units) {
    for (GroupShape& group : unit.groups) group.dtype = DType::kBF16;
  }
  input.placement.is_queued = true;
  input.tiers.record_bytes = 16 << 10;
  input.tiers.queue_depth = 1;
  input.tiers.masters.tier = input.tiers.moments.tier = Tier::kAuto;
  for (const OffloadedStep step : {OffloadedStep::kGpu, OffloadedStep::kCpu}) {
    input.tiers.step = step;
    const auto plan_of = [&](double share) {
      PlanInput chosen = input;
      chosen.tiers.masters = chosen.tiers.moments = share > 0 ? OffloadedState{Tier::kHost, share} : OffloadedState{};
      return MemoryPlan(chosen);
    };
    const std::int64_t most = plan_of(0).use().limited(), least = plan_of(1).use().limited();
    ASSERT_LT(least, most);
    for (std::int64_t limit = least; limit < most; limit += (most - least) / 8) {
      const PlanInput chosen = with_tiers_chosen(input, limit, Tier::kHost);
      EXPECT_EQ(chosen.tiers.masters, chosen.tiers.moments);
      EXPECT_EQ(chosen.tiers.moments.tier, Tier::kHost);
      const MemoryPlan plan(chosen);
      EXPECT_LE(plan.use().limited(), limit);
      EXPECT_GT(plan.records().states.pinned_bytes, 0);
      EXPECT_GT(plan_of(chosen.tiers.moments.fraction - 1.0 / 256).use().limited(), limit) << "as little as possible";
    }
    EXPECT_EQ(with_tiers_chosen(input, most, Tier::kHost).tiers.moments.tier, Tier::kMemory);
  }
}

TEST(MemoryPlan, StatesOfAGroupDoNotLieAMultipleOf128MiBApart) {
  constexpr std::int64_t kSlow = 128 * kMiB, kNear = 8 << 10;
  for (const StateDType dtype : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    for (std::int64_t numel = 256; numel <= 512 * kMiB; numel *= 2) {
      const StateBytes needed = state_bytes(dtype, numel);
      const StatePiece piece = state_piece(dtype, numel);
      EXPECT_GE(piece.data_bytes, needed.data);
      EXPECT_LE(piece.data_bytes - needed.data, numel < kMiB ? 0 : 48 << 10);
      const std::int64_t rest = piece.data_bytes % kSlow;
      EXPECT_GE(std::min(rest, kSlow - rest), std::min(needed.data, kNear)) << numel;
    }
  }
}

TEST(MemoryPlan, ActivationsOnDiskTakeSlotsAndNothingElse) {
  PlanInput input = input_of(kMiB, 4, {1, 2, 0, 0});
  const MemoryPlan without(input);
  EXPECT_EQ(without.use()[MemoryCategory::kActivations], 0);
  input.tiers.queue_depth = 3;
  input.tiers.record_bytes = 10000;  // a slot is rounded up to whole pages
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    input.tiers.activations = tier;
    MemoryUse wanted = without.use();
    wanted[MemoryCategory::kActivations] = tier == Tier::kNvme ? 7 * 12288 : 0;
    const MemoryPlan plan(input);
    EXPECT_EQ(plan.use(), wanted);
    EXPECT_EQ(plan.records().disk, without.records().disk);
    EXPECT_NE(plan.to_table().find("that forward saves go to"), std::string::npos);
  }
  EXPECT_EQ(without.to_table().find("that forward saves go to"), std::string::npos);
}

}  // namespace
}  // namespace tessera
