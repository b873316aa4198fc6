// Tests the companding codes of 8-bit optimizer states: 128 or 256 steps whose spacing grows with the number.

#include "optim/arithmetic/companding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "optim/arithmetic/block_codes.h"

namespace tessera {
namespace {

using Lanes = Simd<4>;

/// Encodes and decodes one number at a time, for both code sizes.
template <class T>
struct CompandingTest : ::testing::Test {
  static constexpr std::uint32_t kSteps = T::value;
  using Code = Companding<Lanes, kSteps>;
  static constexpr std::uint32_t kNoises = 1u << Code::kNoiseBits;

  static std::uint32_t encode(float x, std::uint32_t noise) {
    const Lanes::Bits encoded = Code::encode(Lanes::Float{} + x / 2, Lanes::Bits{} + noise);
    return Code::code(Lanes::words<Code::kNoiseBits>({encoded}))[0];
  }
  static float decode(std::uint32_t code, float scale = 1.0f) {
    return Code::decode(Lanes::Int{} + static_cast<std::int32_t>(code), scale)[0];
  }
};
using Sizes = ::testing::Types<std::integral_constant<std::uint32_t, 128>, std::integral_constant<std::uint32_t, 256>>;
TYPED_TEST_SUITE(CompandingTest, Sizes);

TYPED_TEST(CompandingTest, CodesReproduceThemselvesWhateverTheNoise) {
  for (std::uint32_t code = 0; code < TestFixture::kSteps; ++code) {
    for (std::uint32_t noise : {0u, 1u, TestFixture::kNoises / 2, TestFixture::kNoises - 1}) {
      ASSERT_EQ(TestFixture::encode(TestFixture::decode(code), noise), code) << noise;
    }
  }
  EXPECT_EQ(TestFixture::decode(0), 0.0f);
  EXPECT_EQ(TestFixture::decode(TestFixture::kSteps - 1), TestFixture::Code::kLargest);
}

TYPED_TEST(CompandingTest, RoundingUpIsAsLikelyAsTheUpperCodeIsNear) {
  for (std::uint32_t code = 0; code + 1 < TestFixture::kSteps; ++code) {
    const double below = TestFixture::decode(code), above = TestFixture::decode(code + 1);
    for (double share : {0.125, 0.5, 0.8125}) {
      const auto x = static_cast<float>(below + share * (above - below));
      // The code never falls if the noise grows. So the noise at which the code changes shows how often the upper code
      // is drawn.
      std::uint32_t ups = 0;
      const std::uint32_t noises = TestFixture::kNoises;
      for (std::uint32_t bit = noises / 2; bit > 0; bit >>= 1) {
        if (TestFixture::encode(x, noises - (ups + bit)) == code + 1) ups += bit;
      }
      const double mean = below + (above - below) * ups / noises;
      ASSERT_NEAR(mean, x, (above - below) * 1e-3) << "code " << code;
    }
  }
}

TYPED_TEST(CompandingTest, DecodedCodesAreTheInverseOfTheFormula) {
  for (std::uint32_t code = 0; code < TestFixture::kSteps; ++code) {
    const double phi = (code + 2.0) / TestFixture::kSteps;
    int exponent;
    const double f = 2 * std::frexp(phi, &exponent);  // phi = f * 2^(exponent - 1), 1 <= f < 2
    const double x = std::ldexp(f < 1.5 ? 2 * f - 1 : 4 * f - 4, 2 * (exponent - 1));
    ASSERT_EQ(TestFixture::decode(code), x - TestFixture::Code::kOffset) << code;
  }
}

TYPED_TEST(CompandingTest, FusedMultiplyAddDecodesToTheSameBits) {
  for (float scale : {0x1p-112f, 0x1.fffffep-112f, 1.0f / 3.0f, 1e-3f, 0x1.fffffep124f}) {
    for (std::uint32_t code = 0; code < TestFixture::kSteps; ++code) {
      const float offset = TestFixture::Code::kOffset, sum = TestFixture::decode(code) + offset;
      const float fused = std::fma(sum / 2, 2 * scale, -(offset * scale));
      ASSERT_EQ(TestFixture::decode(code, scale), fused) << code << " " << scale;
    }
  }
}

TYPED_TEST(CompandingTest, InexactScaleBecomesZeroOrNaN) {
  using Code = typename TestFixture::Code;
  const float infinity = std::numeric_limits<float>::infinity();
  for (float most : {0x1p125f, 3e38f, infinity, -NAN, NAN})
    EXPECT_TRUE(std::isnan(block_scale<Code>(most).scale)) << most;
  for (float most : {0.0f, 1e-45f, 0x1p-113f, 0x1p-112f}) {
    EXPECT_EQ(block_scale<Code>(most).scale, 0.0f) << most;
    EXPECT_EQ(block_scale<Code>(most).half_inverse, 0.0f) << most;
  }
  for (float most : {0x1.05p-112f, 1.0f, 0x1.fffffep124f}) {
    const BlockScale scale = block_scale<Code>(most);
    EXPECT_NEAR(TestFixture::decode(TestFixture::kSteps - 1, scale.scale) / most, 1.0, 1e-6) << most;
    EXPECT_NEAR(most * scale.half_inverse, Code::kLargest / 2, 1e-6) << most;
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

TYPED_TEST(CompandingTest, TooLargeNumbersAndNaNGetTheLargestCode) {
  for (float x : {2.0f, 3e38f, std::numeric_limits<float>::infinity(), NAN, -NAN}) {
    for (std::uint32_t noise : {0u, TestFixture::kNoises - 1})
      EXPECT_EQ(TestFixture::encode(x, noise), TestFixture::kSteps - 1) << x;
  }
}

}  // namespace
}  // namespace tessera
