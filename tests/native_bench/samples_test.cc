// Tests quantiles and ratios of measured samples.

#include "workshop/bench/samples.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tessera {
namespace {

TEST(Samples, QuantilesAreSamplesInAnyOrder) {
  Samples samples;
  for (std::int64_t ns : {50, 10, 40, 20, 30}) samples.ns.push_back(ns);
  EXPECT_DOUBLE_EQ(samples.median_s(), 30e-9);
  EXPECT_DOUBLE_EQ(samples.quantile_s(0.2), 10e-9);
  EXPECT_DOUBLE_EQ(samples.quantile_s(0.21), 20e-9);
  EXPECT_DOUBLE_EQ(samples.quantile_s(1.0), 50e-9);
  EXPECT_EQ(samples.ns[0], 50);
}

TEST(Samples, PercentilesOf1To100AreThoseRanks) {
  Samples samples;
  samples.ns.resize(100);
  std::iota(samples.ns.begin(), samples.ns.end(), 1);
  EXPECT_DOUBLE_EQ(samples.quantile_s(0.1), 10e-9);
  EXPECT_DOUBLE_EQ(samples.quantile_s(0.9), 90e-9);
  EXPECT_DOUBLE_EQ(samples.quantile_s(0.99), 99e-9);
}

TEST(Samples, NoSamplesGiveZero) { EXPECT_EQ(Samples().median_s(), 0); }

/// One contender is twice as fast in every turn, although the machine becomes three times slower after the first turn.
TEST(Samples, RatioByTurnsIgnoresASlowdownOfBoth) {
  const Samples longer{{20, 20, 20, 60, 60, 60, 60, 60, 60}}, shorter{{10, 10, 90, 30, 30, 30, 30, 30, 30}};
  EXPECT_DOUBLE_EQ(ratio_by_turns(longer, shorter, 3), 2.0);
  const Samples moved{{10, 10, 10, 30, 30, 30}};  // the samples come from two turns
  EXPECT_DOUBLE_EQ(ratio_by_turns(longer, moved, 3), 2.0);
  EXPECT_EQ(ratio_by_turns(longer, Samples(), 3), 0);
}

}  // namespace
}  // namespace tessera
