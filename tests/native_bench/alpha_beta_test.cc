// Tests the fit of a line (latency and time per byte) to measured times.

#include "workshop/bench/alpha_beta.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace tessera {
namespace {

TEST(AlphaBeta, ExactPointsGiveTheirLine) {
  const std::vector<TimedBytes> points = {{4, 10e-6 + 4e-10}, {1'000'000, 110e-6}, {10'000'000, 1010e-6}};
  const AlphaBeta fit = fit_alpha_beta(points);
  EXPECT_NEAR(fit.alpha_s, 10e-6, 1e-12);
  EXPECT_NEAR(fit.beta_s_per_byte, 1e-10, 1e-16);
  EXPECT_NEAR(fit.seconds_of(3, 2'000'000), 230e-6, 1e-10);
}

/// A short message that is 10 % off counts as much as a long one that is 10 % off.
TEST(AlphaBeta, ShortAndLongMessagesCountAlikeInTheFit) {
  const AlphaBeta fit = fit_alpha_beta(std::vector<TimedBytes>{{0, 1e-6}, {0, 1e-6}, {1 << 30, 1.2}, {1 << 30, 1.0}});
  EXPECT_NEAR(fit.alpha_s, 1e-6, 1e-9);
}

TEST(AlphaBeta, PointsWithoutALineAreRefused) {
  EXPECT_THROW(fit_alpha_beta({}), std::invalid_argument);
  EXPECT_THROW(fit_alpha_beta(std::vector<TimedBytes>{{8, 1}, {8, 2}}), std::invalid_argument);
  EXPECT_THROW(fit_alpha_beta(std::vector<TimedBytes>{{8, 1}, {16, 0}}), std::invalid_argument);
}

}  // namespace
}  // namespace tessera
