#include "tessera/scaling.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(ScaledSpeedup, EqualsGustafsonsPublishedNumbers) {
  // Gustafson's paper has three problems on 1024 processors. The first arguments are the serial shares that the paper
  // reports.
  EXPECT_NEAR(scaled_speedup(0.004, 1024), 1020, 0.5);
  EXPECT_NEAR(scaled_speedup(0.005, 1024), 1019, 0.5);
  EXPECT_NEAR(scaled_speedup(0.007, 1024), 1017, 0.5);
  EXPECT_DOUBLE_EQ(scaled_speedup(0.25, 8), 6.25);
}

TEST(ScaledSpeedup, LiesBetweenOneAndTheNumberOfRanks) {
  for (const int ranks : {1, 2, 64}) {
    EXPECT_EQ(scaled_speedup(0, ranks), ranks);
    EXPECT_EQ(scaled_speedup(1, ranks), 1);
  }
}

TEST(ScalingEfficiency, EqualsSpeedupDividedByRanks) {
  EXPECT_DOUBLE_EQ(scaling_efficiency(0.25, 8), 6.25 / 8);
  EXPECT_EQ(scaling_efficiency(0, 8), 1);
  EXPECT_EQ(scaling_efficiency(1, 8), 1.0 / 8);
  EXPECT_EQ(scaling_efficiency(0.5, 1), 1);
}

}  // namespace
}  // namespace tessera
