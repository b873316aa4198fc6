// Tests masters and optimizer state in fewer bytes. Bits are the same under every strategy, bytes are as planned, and
// training stays close to the run with everything in fp32.

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "tests/support/pairwise.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace optimizer_memory_test {

struct Kept {
  DType param;
  MasterKind master;
  StateDType state;
};
constexpr Kept kFp32{DType::kF32, MasterKind::kF32, StateDType::kF32};
constexpr Kept kKept[] = {{DType::kF32, MasterKind::kSplitBF16, StateDType::kBF16},
                          {DType::kF32, MasterKind::kSplitBF16, StateDType::k8Bit},
                          {DType::kBF16, MasterKind::kF32, StateDType::kF32},
                          {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32},
                          {DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16},
                          {DType::kBF16, MasterKind::kSplitBF16, StateDType::k8Bit},
                          {DType::kF16, MasterKind::kSplitBF16, StateDType::k8Bit}};

Strategy strategy_of(const Kept& kept, const Placed& placed) {
  return strategy_for(
      placed,
      [&](Strategy& s) {
        s.mixed_precision.master = kept.master;
        s.optimizer.state_dtype = kept.state;
      },
      kept.param);
}

std::string name_of(const Kept& kept) {
  return std::string(tessera::name_of(kept.param)) + (kept.master == MasterKind::kF32 ? ", whole masters, " : ", ") +
         tessera::name_of(kept.state);
}

// This model has a frozen block, an unused block and a tied head, so the runs of elements in an update begin and end
// inside a unit.
constexpr TinyOptions kAwkward{.tied_head = true, .frozen_first_block = true, .unused_block = true};

TEST(OptimizerMemory, StrategiesGiveTheSameBitsAndThePlansMemory) {
  const std::pair<const char*, TinyOptions> models[] = {{"plain", {}}, {"awkward", kAwkward}};
  for (const auto& [kept, ranks, model] : pairwise_of<2>(kKept, std::array{1, 2, 3, 4}, models)) {
    const TrainOptions options{.model = model.second};
    std::optional<Trained> first;
    for (const Placed& placed : kOnePerPlacement) {
      const std::string what =
          name_of(kept) + ", " + name_of(placed) + ", " + model.first + " on " + std::to_string(ranks) + " ranks";
      const Trained trained = train_on_threads({.ranks = ranks}, strategy_of(kept, placed), options);
      if (first) expect_same_bits(trained, *first, what);
      for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << what;
      if (!first) first = trained;
    }
  }
}

TEST(OptimizerMemory, LossStaysCloseToTheRunInFp32) {
  TrainOptions options;
  options.steps = 60;
  const Trained wanted = train_on_threads({.ranks = 2}, strategy_of(kFp32, ShardingStrategy::kFullShard), options);
  const double fall = wanted.steps.front().loss - wanted.steps.back().loss;
  ASSERT_GT(fall, 0.05);
  for (const Kept& kept : kKept) {
    const Trained trained = train_on_threads({.ranks = 2}, strategy_of(kept, ShardingStrategy::kFullShard), options);
    EXPECT_NEAR(trained.steps.back().loss, wanted.steps.back().loss, 0.05 * fall) << name_of(kept);
  }
}

TEST(OptimizerMemory, BytesEqualThoseOfTheFormats) {
  const auto bytes = [](const Kept& kept) {
    Topology alone;
    return plan_memory(*make_tiny({.vocab = 256, .width = 64, .hidden = 256}, true),
                       strategy_of(kept, ShardingStrategy::kFullShard), alone)
        .use;
  };
  const MemoryUse fp32 = bytes(kFp32);
  const std::int64_t numel = fp32[MemoryCategory::kParameters] / 4;
  EXPECT_EQ(fp32[MemoryCategory::kMasters], 0);
  EXPECT_EQ(fp32[MemoryCategory::kOptimizer], 8 * numel);
  const MemoryUse small = bytes({DType::kBF16, MasterKind::kSplitBF16, StateDType::kBF16});
  EXPECT_EQ(small[MemoryCategory::kMasters], 2 * numel);
  EXPECT_EQ(small[MemoryCategory::kOptimizer], 4 * numel);
  // Tensors begin at blocks of 256, so there is more padding. Each block has a scale of 4 bytes.
  const MemoryUse smallest = bytes({DType::kBF16, MasterKind::kSplitBF16, StateDType::k8Bit});
  const std::int64_t padded = smallest[MemoryCategory::kParameters] / 2;
  EXPECT_NEAR(static_cast<double>(smallest[MemoryCategory::kOptimizer]) / static_cast<double>(padded),
              2 + 2 * 4.0 / 256, 0.02);
}

}  // namespace optimizer_memory_test
}  // namespace tessera::testing
