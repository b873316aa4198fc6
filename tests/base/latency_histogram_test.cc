// Tests that a LatencyHistogram gives the right percentiles of known times, from a nanosecond to hours.

#include "runtime/base/metrics/latency_histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace tessera {
namespace {

using std::chrono::nanoseconds;

TEST(LatencyHistogram, WithoutCallsHasNoPercentile) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0);
  EXPECT_EQ(histogram.max(), 0);
  EXPECT_TRUE(std::isnan(histogram.percentile(50)));
}

TEST(LatencyHistogram, SmallTimesAreExact) {
  LatencyHistogram histogram;
  for (int time = 1; time <= 20; ++time) histogram.add(nanoseconds(time));
  EXPECT_EQ(histogram.count(), 20);
  EXPECT_DOUBLE_EQ(histogram.percentile(50), 10e-9);
  EXPECT_DOUBLE_EQ(histogram.percentile(95), 19e-9);
  EXPECT_DOUBLE_EQ(histogram.percentile(99), 20e-9);
  EXPECT_DOUBLE_EQ(histogram.percentile(1), 1e-9);
  EXPECT_DOUBLE_EQ(histogram.max(), 20e-9);
}

TEST(LatencyHistogram, PercentilesAreWithinASixteenthAboveTheNearestRank) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> times(13, 4);  // from nanoseconds to minutes, with a median of 0.4 ms
  LatencyHistogram histogram;
  std::vector<double> all;
  for (int i = 0; i < 20'000; ++i) {
    const nanoseconds time(static_cast<std::int64_t>(times(random)));
    histogram.add(time);
    all.push_back(static_cast<double>(time.count()) * 1e-9);
  }
  std::ranges::sort(all);
  for (const double percent : {1.0, 10.0, 50.0, 95.0, 99.0, 99.99}) {
    const double exact = all[static_cast<std::size_t>(std::ceil(percent / 100 * 20'000)) - 1];
    EXPECT_GE(histogram.percentile(percent), exact * (1 - 1e-12)) << percent;
    EXPECT_LE(histogram.percentile(percent), exact * (1 + 1.0 / 16)) << percent;
  }
  EXPECT_DOUBLE_EQ(histogram.percentile(100), all.back());
  EXPECT_DOUBLE_EQ(histogram.max(), all.back());
}

TEST(LatencyHistogram, TimesBeyondBothEndsAreCounted) {
  LatencyHistogram histogram;
  histogram.add(nanoseconds(-5));
  histogram.add(std::chrono::hours(100));
  EXPECT_EQ(histogram.count(), 2);
  EXPECT_DOUBLE_EQ(histogram.percentile(50), 0);
  EXPECT_DOUBLE_EQ(histogram.max(), 360'000);
}

}  // namespace
}  // namespace tessera
