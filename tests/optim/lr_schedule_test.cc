// Tests the schedules of the learning rate, and compares them with PyTorch's schedulers if PyTorch has them.

#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

constexpr double kPeak = 0.5;

void expect_rates(const LrScheduleConfig& config, const std::vector<double>& wanted) {
  for (std::size_t step = 0; step < wanted.size(); ++step) {
    EXPECT_NEAR(lr_at(config, kPeak, static_cast<std::int64_t>(step), 0), wanted[step], 1e-14) << "step " << step;
  }
}

// The constants are the results of PyTorch 2.11's schedulers for a peak of 0.5.

// SequentialLR([LinearLR(1 / 5, 1.0, 4), CosineAnnealingLR(8, eta_min=0.05)], [4])
TEST(LrSchedule, CosineFollowsPyTorch) {
  expect_rates({.type = LrScheduleType::kCosine, .warmup_steps = 4, .total_steps = 12, .min_ratio = 0.1},
               {0.10000000000000001, 0.20000000000000001, 0.30000000000000004, 0.40000000000000002, 0.5,
                0.48287289481503953, 0.43409902576697318, 0.36110377228214524, 0.27500000000000002, 0.18889622771785486,
                0.11590097423302685, 0.067127105184960498, 0.050000000000000003});
}

// SequentialLR([LinearLR(1 / 5, 1.0, 4), LinearLR(1.0, 0.1, 8)], [4])
TEST(LrSchedule, LinearFollowsPyTorch) {
  expect_rates({.type = LrScheduleType::kLinear, .warmup_steps = 4, .total_steps = 12, .min_ratio = 0.1},
               {0.10000000000000001, 0.20000000000000001, 0.30000000000000004, 0.40000000000000002, 0.5,
                0.44374999999999998, 0.38749999999999996, 0.33124999999999999, 0.27500000000000002, 0.21875,
                0.16250000000000001, 0.10624999999999998, 0.049999999999999989});
}

// OneCycleLR(0.5, total_steps=12, pct_start=0.3, div_factor=25, final_div_factor=4, cycle_momentum=False)
TEST(LrSchedule, OneCycleFollowsPyTorch) {
  expect_rates({.type = LrScheduleType::kOneCycle, .total_steps = 12, .min_ratio = 0.01},
               {0.020000000000000018, 0.17489482710979154, 0.43964257956106434, 0.49723562949071926,
                0.46684128743664854, 0.40681372596003651, 0.32545190566669879, 0.23400430183736001, 0.14511377456840438,
                0.071069661722118038, 0.022108747210559478, 0.0050000000000000001});
}

TEST(LrSchedule, OneCycleUsesWarmUpStepsWhereGiven) {
  const LrScheduleConfig config{.type = LrScheduleType::kOneCycle, .warmup_steps = 6, .total_steps = 13};
  EXPECT_NEAR(lr_at(config, kPeak, 0, 0), 0.04 * kPeak, 1e-15);
  EXPECT_NEAR(lr_at(config, kPeak, 3, 0), 0.52 * kPeak, 1e-15);
  EXPECT_EQ(lr_at(config, kPeak, 6, 0), kPeak);
  EXPECT_NEAR(lr_at(config, kPeak, 9, 0), 0.5 * kPeak, 1e-15);
  EXPECT_NEAR(lr_at(config, kPeak, 12, 0), 0.0, 1e-15);
}

TEST(LrSchedule, ConstantStaysAtThePeak) {
  expect_rates({.warmup_steps = 1}, {0.25, 0.5, 0.5, 0.5});
  expect_rates({}, {0.5, 0.5});
}

TEST(LrSchedule, InverseSqrtFallsWithTheRootAndStopsAtTheMinimum) {
  const LrScheduleConfig config{.type = LrScheduleType::kInverseSqrt, .warmup_steps = 99, .min_ratio = 0.25};
  EXPECT_NEAR(lr_at(config, kPeak, 49, 0), kPeak * 0.5, 1e-15);
  EXPECT_EQ(lr_at(config, kPeak, 99, 0), kPeak);
  EXPECT_NEAR(lr_at(config, kPeak, 399, 0), kPeak * 0.5, 1e-15);
  EXPECT_EQ(lr_at(config, kPeak, 1000000, 0), kPeak * 0.25);
}

TEST(LrSchedule, WsdIsStableThenDecays) {
  expect_rates({.type = LrScheduleType::kWsd, .warmup_steps = 1, .total_steps = 8, .decay_steps = 4, .min_ratio = 0.2},
               {0.25, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1});
}

TEST(LrSchedule, RateStaysAtItsEndBeyondTotalSteps) {
  for (LrScheduleType type :
       {LrScheduleType::kLinear, LrScheduleType::kCosine, LrScheduleType::kOneCycle, LrScheduleType::kWsd}) {
    const LrScheduleConfig config{.type = type, .total_steps = 20, .decay_steps = 5, .min_ratio = 0.3};
    EXPECT_NEAR(lr_at(config, kPeak, 20, 0), 0.3 * kPeak, 1e-15) << static_cast<int>(type);
    EXPECT_NEAR(lr_at(config, kPeak, 1000, 0), 0.3 * kPeak, 1e-15) << static_cast<int>(type);
  }
}

TEST(LrSchedule, WarmUpIsNeverZeroAndJoinsWithoutAJump) {
  for (LrScheduleType type : {LrScheduleType::kConstant, LrScheduleType::kLinear, LrScheduleType::kCosine,
                              LrScheduleType::kInverseSqrt, LrScheduleType::kWsd}) {
    const LrScheduleConfig config{.type = type, .warmup_steps = 10, .total_steps = 100, .decay_steps = 10};
    EXPECT_GT(lr_at(config, kPeak, 0, 0), 0.0);
    for (int step = 0; step < 10; ++step) {
      EXPECT_NEAR(lr_at(config, kPeak, step + 1, 0) - lr_at(config, kPeak, step, 0), kPeak / 11, 1e-15);
    }
    EXPECT_EQ(lr_at(config, kPeak, 10, 0), kPeak);
  }
}

// SequentialLR([LinearLR(0.2, 1.0, 4), ConstantLR(1.0)], [4])
TEST(LrSchedule, WarmUpBeginsAtTheGivenShare) {
  expect_rates({.warmup_steps = 4, .warmup_from = 0.2}, {0.1, 0.2, 0.3, 0.4, 0.5, 0.5});
  expect_rates({.warmup_steps = 2, .warmup_from = 1}, {0.5, 0.5, 0.5});
}

TEST(LrSchedule, RiseOverSamplesEqualsThatOverStepsOfEqualBatches) {
  constexpr std::int64_t kBatch = 48;
  for (const double from : {0.0, 0.3}) {
    const LrScheduleConfig steps{.warmup_steps = 7, .warmup_from = from};
    const LrScheduleConfig samples{.warmup_from = from, .warmup_samples = 7 * kBatch};
    const LrScheduleConfig epochs{.warmup_from = from, .warmup_epochs = 3.5, .epoch_samples = 2 * kBatch};
    for (std::int64_t step = 0; step < 10; ++step) {
      const double wanted = lr_at(steps, kPeak, step, kBatch);
      EXPECT_EQ(lr_at(samples, kPeak, step, kBatch, step * kBatch), wanted) << step;
      EXPECT_EQ(lr_at(epochs, kPeak, step, kBatch, step * kBatch), wanted) << step;
    }
  }
}

TEST(LrSchedule, RiseOverSamplesFollowsUnequalBatchesBesideTheSchedule) {
  const LrScheduleConfig cosine{.type = LrScheduleType::kCosine, .total_steps = 10};
  LrScheduleConfig rising = cosine;
  rising.warmup_samples = 100;
  EXPECT_DOUBLE_EQ(lr_at(rising, kPeak, 3, 20, 40), lr_at(cosine, kPeak, 3, 0) * 60 / 120);
  EXPECT_DOUBLE_EQ(lr_at(rising, kPeak, 3, 60, 40), lr_at(cosine, kPeak, 3, 0) * 100 / 160);
  EXPECT_EQ(lr_at(rising, kPeak, 3, 20, 100), lr_at(cosine, kPeak, 3, 0));
  rising.base_batch_size = 10;
  EXPECT_DOUBLE_EQ(lr_at(rising, kPeak, 3, 20, 40), lr_at(cosine, kPeak, 3, 0));
}

TEST(LrSchedule, SquareRootScalingFollowsTheBatchRatio) {
  const LrScheduleConfig config{.base_batch_size = 256, .batch_scaling = BatchScaling::kSquareRoot};
  EXPECT_EQ(lr_at(config, 0.1, 5, 256), 0.1);
  EXPECT_EQ(lr_at(config, 0.1, 5, 1024), 0.2);
}

TEST(LrSchedule, LinearScalingFollowsTheBatchRatio) {
  const LrScheduleConfig config{.base_batch_size = 256};
  EXPECT_EQ(lr_at(config, 0.1, 5, 256), 0.1);
  EXPECT_DOUBLE_EQ(lr_at(config, 0.1, 5, 8192), 3.2);
  EXPECT_EQ(lr_at({}, 0.1, 5, 8192), 0.1);
}

}  // namespace
}  // namespace tessera
