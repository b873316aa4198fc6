// Tests the random factors that are applied to the times of simulated ranks.

#include "planner/jitter.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

TEST(Jitter, ZeroJitterIsExactlyOne) { EXPECT_EQ(Jitter(0, 7).factor(3, 2, 1), 1.0); }

TEST(Jitter, FactorDependsOnSeedAndPlaceAlone) {
  const Jitter jitter(0.3, 7);
  const double factor = jitter.factor(3, 2, 1);
  EXPECT_EQ(Jitter(0.3, 7).factor(3, 2, 1), factor);
  EXPECT_NE(Jitter(0.3, 8).factor(3, 2, 1), factor);
  EXPECT_NE(jitter.factor(4, 2, 1), factor);
  EXPECT_NE(jitter.factor(3, 1, 2), factor);
  EXPECT_NE(jitter.factor(3, 2, 2), factor);
}

TEST(Jitter, DrawsAreEvenlyDistributedAndDependOnSeedStepAndRank) {
  const Jitter jitter(0, 7);
  EXPECT_NE(jitter.draw(1, 2), jitter.draw(2, 2));
  EXPECT_NE(jitter.draw(1, 2), jitter.draw(1, 3));
  EXPECT_NE(jitter.draw(1, 2), Jitter(0, 8).draw(1, 2));
  int below = 0;
  for (int i = 0; i < 10000; ++i) below += jitter.draw(i / 10, i % 10) < 0.02 ? 1 : 0;
  EXPECT_NEAR(below, 200, 70);
}

TEST(Jitter, FactorsHaveTheRequestedMeanAndDeviation) {
  for (const double relative : {0.01, 0.1, 0.5}) {
    const Jitter jitter(relative, 1);
    constexpr int kCount = 200000;
    double sum = 0, squares = 0;
    for (int i = 0; i < kCount; ++i) {
      const double factor = jitter.factor(i / 1000, i % 100, static_cast<std::size_t>(i % 1000 / 100));
      EXPECT_GT(factor, 0);
      sum += factor;
      squares += factor * factor;
    }
    const double mean = sum / kCount;
    EXPECT_NEAR(mean, 1, 5 * relative / std::sqrt(kCount));
    EXPECT_NEAR(std::sqrt(squares / kCount - mean * mean) / relative, 1, 0.02);
  }
}

}  // namespace
}  // namespace tessera
