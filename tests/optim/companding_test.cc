#include "optim/companding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

using Lanes = Simd<4>;

/// One number at a time, for both sizes of code.
template <class T>
struct CompandingTest : testing::Test {
  static constexpr std::uint32_t kSteps = T::value;
  using Code = Companding<Lanes, kSteps>;

  static std::uint32_t encode(float x, std::uint32_t noise) {
    return Code::encode(Lanes::Float{} + x, Lanes::Bits{} + noise)[0] >> 16;
  }
  static float decode(std::uint32_t code) { return Code::decode(Lanes::Int{} + static_cast<std::int32_t>(code))[0]; }
};
using Sizes = testing::Types<std::integral_constant<std::uint32_t, 128>, std::integral_constant<std::uint32_t, 256>>;
TYPED_TEST_SUITE(CompandingTest, Sizes);

TYPED_TEST(CompandingTest, CodesReproduceThemselvesWhateverTheNoise) {
  for (std::uint32_t code = 0; code < TestFixture::kSteps; ++code) {
    for (std::uint32_t noise : {0u, 1u, 32768u, 65535u}) {
      ASSERT_EQ(TestFixture::encode(TestFixture::decode(code), noise), code) << noise;
    }
  }
  EXPECT_EQ(TestFixture::decode(0), 0.0f);
  EXPECT_EQ(TestFixture::decode(TestFixture::kSteps - 1), TestFixture::Code::kLargest);
}

TYPED_TEST(CompandingTest, RoundsUpAsOftenAsTheNumberIsNearTheUpperCode) {
  for (std::uint32_t code = 0; code + 1 < TestFixture::kSteps; ++code) {
    const double below = TestFixture::decode(code), above = TestFixture::decode(code + 1);
    for (double share : {0.125, 0.5, 0.8125}) {
      const auto x = static_cast<float>(below + share * (above - below));
      // The code never falls as noise grows, so where it changes says how often it is the upper one.
      std::uint32_t ups = 0;
      for (std::uint32_t bit = 1 << 15; bit > 0; bit >>= 1) {
        if (TestFixture::encode(x, 65535 - (ups + bit - 1)) == code + 1) ups += bit;
      }
      const double mean = below + (above - below) * ups / 65536.0;
      ASSERT_NEAR(mean, x, (above - below) * 1e-3) << "code " << code;
    }
  }
}

TYPED_TEST(CompandingTest, SpacingGrowsWithTheNumber) {
  const double steps = TestFixture::kSteps;
  EXPECT_EQ(TestFixture::decode(1), 4.0 / (steps * steps));
  double previous = 0.0;
  for (std::uint32_t code = 1; code < TestFixture::kSteps; ++code) {
    const double spacing = TestFixture::decode(code) - TestFixture::decode(code - 1);
    EXPECT_GE(spacing, previous);
    previous = spacing;
    const double x = TestFixture::decode(code);
    if (x < 0.25) continue;
    EXPECT_GE(spacing / x, 1.9 / steps) << x;
    EXPECT_LE(spacing / x, 4.1 / steps) << x;
  }
}

TYPED_TEST(CompandingTest, WhatIsTooLargeOrNaNGetsTheLargestCode) {
  for (float x : {2.0f, 3e38f, std::numeric_limits<float>::infinity(), NAN}) {
    for (std::uint32_t noise : {0u, 65535u}) EXPECT_EQ(TestFixture::encode(x, noise), TestFixture::kSteps - 1) << x;
  }
}

}  // namespace
}  // namespace tessera
