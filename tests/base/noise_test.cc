// Tests the noise of stochastic rounding: its distribution, its independence, and that its numbers do not change within
// one version.

#include "runtime/base/noise.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <set>

namespace tessera {
namespace {

constexpr std::uint32_t kNumel = 1 << 18;

std::uint32_t noise(std::uint64_t stream, std::int64_t step, std::uint32_t element) {
  return noise_at(noise_key(stream, step), element * kNoiseStride);
}
double low(std::uint32_t x) { return (x & 0xffff) - 32767.5; }
double high(std::uint32_t x) { return (x >> 16) - 32767.5; }

TEST(Noise, EveryByteIsUniform) {
  for (std::int64_t step = 1; step <= 8; ++step) {
    std::array<std::array<double, 256>, 4> count{};
    for (std::uint32_t i = 0; i < kNumel; ++i) {
      for (int byte = 0; byte < 4; ++byte) ++count[byte][noise(3, step, i) >> (8 * byte) & 255];
    }
    for (const auto& bins : count) {
      double chi_square = 0.0;  // 255 degrees of freedom: mean 255, standard deviation 22.6
      for (double n : bins) chi_square += std::pow(n - kNumel / 256.0, 2) / (kNumel / 256.0);
      EXPECT_LT(chi_square, 255 + 6 * 22.6) << "step " << step;
    }
  }
}

// The correlation of n pairs of independent numbers has the standard deviation 1 / sqrt(n).
double correlation(const std::function<double(std::uint32_t)>& a, const std::function<double(std::uint32_t)>& b) {
  double sum = 0.0;
  for (std::uint32_t i = 0; i < kNumel; ++i) sum += a(i) * b(i);
  return sum / kNumel / (65536.0 * 65536.0 / 12.0);
}

TEST(Noise, IsUncorrelatedBetweenElementsHalvesStepsAndStreams) {
  const double limit = 6.0 / std::sqrt(kNumel);
  const auto low_of = [](std::uint64_t stream, std::int64_t step, std::uint32_t shift) {
    return [=](std::uint32_t i) { return low(noise(stream, step, i + shift)); };
  };
  const auto high_of = [](std::uint64_t stream, std::int64_t step, std::uint32_t shift) {
    return [=](std::uint32_t i) { return high(noise(stream, step, i + shift)); };
  };
  for (std::uint32_t shift : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 13u, 16u, 21u, 34u, 64u, 256u, 512u, 4096u, 65536u}) {
    EXPECT_LT(std::fabs(correlation(low_of(1, 1, 0), low_of(1, 1, shift))), limit) << shift;
    EXPECT_LT(std::fabs(correlation(high_of(1, 1, 0), high_of(1, 1, shift))), limit) << shift;
    EXPECT_LT(std::fabs(correlation(low_of(1, 1, 0), high_of(1, 1, shift))), limit) << shift;
    EXPECT_LT(std::fabs(correlation(high_of(1, 1, 0), low_of(1, 1, shift))), limit) << shift;
  }
  EXPECT_LT(std::fabs(correlation(low_of(1, 1, 0), high_of(1, 1, 0))), limit);
  for (std::int64_t step : {2, 3, 4, 1000}) {
    EXPECT_LT(std::fabs(correlation(low_of(1, 1, 0), low_of(1, step, 0))), limit) << step;
    EXPECT_LT(std::fabs(correlation(high_of(1, 1, 0), high_of(1, step, 0))), limit) << step;
  }
  for (std::uint64_t stream : {0ull, 2ull, 3ull, 1ull << 40}) {
    EXPECT_LT(std::fabs(correlation(low_of(1, 1, 0), low_of(stream, 1, 0))), limit) << stream;
    EXPECT_LT(std::fabs(correlation(high_of(1, 1, 0), high_of(stream, 1, 0))), limit) << stream;
  }
}

// The noise of one element must be uniform over the steps, so that the element's moments are right on average.
TEST(Noise, OneElementsNoiseIsUniformOverSteps) {
  constexpr int kSteps = 1 << 14;
  const double limit = 6.0 * 18918.0 / std::sqrt(kSteps);  // 18918 is the standard deviation of uniform 16-bit numbers
  for (std::uint32_t element : {0u, 1u, 255u, 1u << 20, 0xffffffffu}) {
    double lows = 0.0, highs = 0.0, successive = 0.0;
    for (int step = 1; step <= kSteps; ++step) {
      lows += low(noise(7, step, element));
      highs += high(noise(7, step, element));
      successive += low(noise(7, step, element)) * low(noise(7, step + 1, element)) / 18918.0;
    }
    EXPECT_LT(std::fabs(lows / kSteps), limit) << element;
    EXPECT_LT(std::fabs(highs / kSteps), limit) << element;
    EXPECT_LT(std::fabs(successive / kSteps), limit) << element;
  }
}

TEST(Noise, EveryBitOfTheKeyMatters) {
  std::set<std::uint32_t> keys;
  const auto insert = [&](std::uint64_t stream, std::int64_t step) {
    const NoiseKey key = noise_key(stream, step);
    return keys.insert(key.start).second;
  };
  EXPECT_TRUE(insert(0, 0));
  for (int bit = 0; bit < 63; ++bit) {
    EXPECT_TRUE(insert(std::uint64_t{1} << bit, 0)) << bit;
    EXPECT_TRUE(insert(0, std::int64_t{1} << bit)) << bit;
  }
}

TEST(Noise, TwoDrawsOfAnElementUseOppositeEndsOfItsBits) {
  EXPECT_EQ((own_noise<true, 15>(0x9234d678u)), 0x5678u);
  EXPECT_EQ((own_noise<true, 16>(0x9234d678u)), 0xd678u);
  EXPECT_EQ((own_noise<false, 14>(0x9234d678u)), 0x9234d678u >> 18);
}

// A run that continues from a checkpoint, or on another processor, must draw the same numbers. If these numbers change,
// kNoiseVersion must change too.
TEST(Noise, NumbersOfVersion3AreTheStoredOnes) {
  EXPECT_EQ(kNoiseVersion, 3);
  EXPECT_EQ(noise(0, 1, 0), 0x7535934eu);
  EXPECT_EQ(noise(5, 100, 12345), 0xf599879fu);
  EXPECT_EQ(noise(~0ull, 1ll << 40, 0xffffffff), 0x46ee12c6u);
}

}  // namespace
}  // namespace tessera
