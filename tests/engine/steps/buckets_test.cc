// Tests units.bucket_cap_mb, which makes the buckets into units. Training is the same as with any other units; only
// collectives differ.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "runtime/comm/shared/run_ranks.h"
#include "sharding/partition.h"
#include "tests/support/session.h"
#include "workshop/models/resnet.h"

namespace tessera::testing {
namespace buckets_test {

constexpr double kKiB = 1.0 / 1024;  // MiB

Strategy bucket_strategy(double cap_mb, double first_mb = 1 * kKiB, DType dtype = DType::kF32) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kNoShard, dtype);
  strategy.units.classes.clear();
  strategy.units.bucket_cap_mb = cap_mb;
  strategy.units.first_bucket_mb = first_mb;
  return strategy;
}

using Names = std::vector<std::string>;

/// Returns the names of a unit's parameters, in the order of its buffer.
Names names_in(const Unit& unit) {
  Names names;
  for (const auto& group : unit.groups) {
    for (const FlatParameter& parameter : group->parameters) names.push_back(parameter.name);
  }
  return names;
}

/// Returns the trainable parameters in the order in which buckets are reduced. The parameter that was registered last
/// comes first.
Names in_order_of_reduction(const std::vector<std::unique_ptr<Unit>>& units) {
  Names names;
  for (std::size_t i = units.size(); i-- > 1;) {
    for (const std::string& name : names_in(*units[i])) names.push_back(name);
  }
  return names;
}

Names trainable_backwards(const torch::nn::Module& module) {
  Names names;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const bool fresh = seen.insert(item.value().unsafeGetTensorImpl()).second;
    if (fresh && item.value().requires_grad()) names.insert(names.begin(), item.key());
  }
  return names;
}

std::int64_t bytes_of(const Unit& unit, std::int64_t element_bytes) {
  std::int64_t bytes = 0;
  for (const auto& group : unit.groups) {
    for (const FlatParameter& parameter : group->parameters) bytes += parameter.numel * element_bytes;
  }
  return bytes;
}

TEST(Buckets, TrainableParametersAreHeldOnceInReverseOrder) {
  for (const TinyOptions& options :
       {TinyOptions{}, TinyOptions{.tied_head = true}, TinyOptions{.frozen_first_block = true}}) {
    for (const double cap : {0.0, 2 * kKiB, 4 * kKiB, 25.0}) {
      Tiny model = make_tiny(options, true);
      const auto units = partition(*model, bucket_strategy(cap), 1);
      EXPECT_EQ(in_order_of_reduction(units), trainable_backwards(*model));
      EXPECT_EQ(units[0]->name, "(root)");
      EXPECT_EQ(names_in(*units[0]).size(), options.frozen_first_block ? 6u : 0u);
      for (std::size_t i = 1; i < units.size(); ++i) {
        EXPECT_EQ(units[i]->name, "bucket." + std::to_string(units.size() - 1 - i));
        const double limit = (i + 1 == units.size() ? std::min(1 * kKiB, cap) : cap) * (1 << 20);
        EXPECT_TRUE(names_in(*units[i]).size() == 1 || bytes_of(*units[i], 4) <= limit) << units[i]->name;
      }
      if (cap == 0.0) {
        EXPECT_EQ(units.size() - 1, trainable_backwards(*model).size());
      }
    }
  }
}

TEST(Buckets, TiedParameterKeepsBothNames) {
  Tiny model = make_tiny({.tied_head = true}, true);
  const auto units = partition(*model, bucket_strategy(0), 1);
  std::map<std::string, Names> aliases;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      for (const FlatParameter& parameter : group->parameters) aliases[parameter.name] = parameter.aliases;
    }
  }
  ASSERT_TRUE(aliases.count("head") || aliases.count("embedding.weight"));
  EXPECT_EQ(aliases.count("head") + aliases.count("embedding.weight"), 1u);
  for (const auto& [name, others] : aliases)
    EXPECT_EQ(others.size(), name == "head" || name == "embedding.weight" ? 1u : 0u);
}

TEST(Buckets, SizesCountBytesOnTheWireAndDtypesDoNotMix) {
  Tiny model = make_tiny({}, true);
  Strategy strategy = bucket_strategy(4 * kKiB, 1 * kKiB, DType::kBF16);
  strategy.mixed_precision.keep_fp32 = {"LayerNorm"};
  const auto as_fp32 = partition(*model, strategy, 1);
  strategy.mixed_precision.reduce = DType::kBF16;
  const auto as_bf16 = partition(*model, strategy, 1);
  EXPECT_LT(as_bf16.size(), as_fp32.size());
  for (const auto* units : {&as_fp32, &as_bf16}) {
    for (std::size_t i = 1; i < units->size(); ++i) EXPECT_EQ((*units)[i]->groups.size(), 1u);
  }
}

TEST(Buckets, ResNet18GivesTheExpectedBuckets) {
  models::ResNet model;
  Strategy strategy = bucket_strategy(25, 1);
  // There are 11 173 962 parameters in 62 tensors. The largest tensor has 9 MiB. The head is the first bucket. The next
  // weight has 9 MiB.
  const auto units = partition(*model, strategy, 1);
  EXPECT_EQ(units.size() - 1, 3u);
  EXPECT_EQ(names_in(*units.back()).front(), "head.bias");
  std::int64_t bytes = 0;
  for (const auto& unit : units) bytes += bytes_of(*unit, 4);
  EXPECT_EQ(bytes, 4 * 11173962);
  strategy.units.bucket_cap_mb = 0;
  EXPECT_EQ(partition(*model, strategy, 1).size() - 1, 62u);
}

struct Case {
  DType dtype, reduce;
  int ranks;
  std::int64_t accumulation;
  GradientSync sync;
};

TEST(Buckets, TrainingHasTheBitsOfOtherUnits) {
  using enum DType;
  for (const Case& c :
       {Case{kF32, kF32, 1, 1, GradientSync::kEachMicrobatch}, Case{kF32, kF32, 2, 1, GradientSync::kEachMicrobatch},
        Case{kF32, kF32, 3, 2, GradientSync::kEachMicrobatch}, Case{kF32, kF32, 2, 2, GradientSync::kLastMicrobatch},
        Case{kBF16, kBF16, 2, 1, GradientSync::kEachMicrobatch}, Case{kBF16, kF32, 3, 2, GradientSync::kEachMicrobatch},
        Case{kF16, kF16, 2, 2, GradientSync::kLastMicrobatch}}) {
    const auto adjusted = [&](Strategy strategy) {
      strategy.mixed_precision.reduce = c.reduce;
      strategy.mixed_precision.keep_fp32 = {"LayerNorm"};
      strategy.gradient_accumulation = c.accumulation;
      strategy.gradient_sync = c.sync;
      strategy.gradient_clipping = 0.5;
      return strategy;
    };
    // A block that runs twice under recomputation is not tested. It gives two gradients in one backward. The second may
    // come before or after its bucket is reduced, so the order of the sum depends on the bucket.
    const std::vector<TinyOptions> models = {
        {}, {.tied_head = true, .frozen_first_block = true}, {.unused_block = true}};
    for (std::size_t m = 0; m < models.size(); ++m) {
      const TinyOptions& model = models[m];
      const TrainOptions options{.model = model, .steps = 4, .batch = 12};
      const ThreadRanks ranks{.ranks = c.ranks};
      const Trained blocks =
          train_on_threads(ranks, adjusted(tiny_strategy(ShardingStrategy::kNoShard, c.dtype)), options);
      for (const double cap : {0.0, 4 * kKiB, 25.0}) {
        SCOPED_TRACE(std::string(name_of(c.dtype)) + " over " + std::string(name_of(c.reduce)) + ", " +
                     std::to_string(c.ranks) + " ranks, " + std::to_string(c.accumulation) + " microbatches, cap " +
                     std::to_string(cap) + ", model " + std::to_string(m));
        const Trained buckets = train_on_threads(ranks, adjusted(bucket_strategy(cap, 1 * kKiB, c.dtype)), options);
        expect_same_bits(buckets, blocks, "buckets");
        EXPECT_EQ(buckets.steps.back().planned, buckets.allocated_at_end);
      }
    }
  }
}

TEST(Buckets, EachBucketIsOneReductionPerStep) {
  for (const DType reduce : {DType::kF32, DType::kBF16}) {
    for (const double cap : {0.0, 4 * kKiB, 25.0}) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Strategy strategy = bucket_strategy(cap);
        strategy.mixed_precision.reduce = reduce;
        Session session(mesh, strategy);
        const auto buckets = static_cast<std::int64_t>(session.engine.unit_names().size()) - 1;
        EXPECT_EQ(session.engine.allocated(), session.engine.plan().use);
        for (int step = 0; step < 3; ++step) {
          const TrafficCounts before = session.engine.traffic();
          session.train(step);
          const TrafficCounts after = session.engine.traffic();
          EXPECT_EQ(after.reductions - before.reductions, buckets) << "cap " << cap;
          EXPECT_GT(after.reduction_seconds, before.reduction_seconds);
          if (step > 0) {
            EXPECT_EQ(after.overflow_buckets, before.overflow_buckets) << "cap " << cap;
          }
        }
      });
    }
  }
}

}  // namespace buckets_test
}  // namespace tessera::testing
