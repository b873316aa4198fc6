// Tests rounding to bf16 and fp16, stochastic rounding, and masters that are split in two halves.

#include "optim/arithmetic/rounding.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

double value_of_bf16(std::uint16_t half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }

double value_of_fp16(std::uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double mantissa = half & 1023;
  const double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * HUGE_VAL;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0 + mantissa, exponent - 25));
}

struct Format {
  const char* name;
  std::uint16_t (*round)(float);
  double (*value)(std::uint16_t);
  std::uint16_t infinity;  // bits of +infinity; one less is the largest finite number
  double beyond_largest;   // the number that would follow the largest finite number
};
std::uint16_t to_bf16(float x) { return static_cast<std::uint16_t>(bf16_nearest<std::uint32_t>(x)); }
std::uint16_t to_fp16(float x) { return static_cast<std::uint16_t>(fp16_nearest<std::uint32_t>(x)); }
const Format kFormats[] = {{"bf16", to_bf16, value_of_bf16, 0x7f80, std::ldexp(1.0, 128)},
                           {"fp16", to_fp16, value_of_fp16, 0x7c00, 65536.0}};

// This is the definition: between two neighbours of the format, numbers below the middle go down, numbers above it go
// up, and the middle goes to the neighbour whose last bit is 0. The test is exact in fp64, for every pair of neighbours
// of both signs.
TEST(Rounding, RoundsToNearestEvenBetweenAllNeighbours) {
  for (const Format& format : kFormats) {
    for (std::uint32_t low = 0; low < format.infinity; ++low) {
      const double below = format.value(static_cast<std::uint16_t>(low));
      const double above =
          low + 1 == format.infinity ? format.beyond_largest : format.value(static_cast<std::uint16_t>(low + 1));
      const auto middle = static_cast<float>(0.5 * (below + above));
      if (static_cast<double>(middle) != 0.5 * (below + above)) continue;  // fp32 cannot hold this middle
      for (std::uint16_t sign : {0x0000, 0x8000}) {
        const auto rounded = [&](float x) { return format.round(sign != 0 ? -x : x); };
        const auto wanted = [&](std::uint32_t bits) { return static_cast<std::uint16_t>(bits | sign); };
        ASSERT_EQ(rounded(static_cast<float>(below)), wanted(low)) << format.name;
        ASSERT_EQ(rounded(std::nextafter(middle, 0.0f)), wanted(low)) << format.name << " below the middle";
        ASSERT_EQ(rounded(middle), wanted(low + low % 2)) << format.name << " at the middle above " << low;
        ASSERT_EQ(rounded(std::nextafter(middle, HUGE_VALF)), wanted(low + 1)) << format.name << " above the middle";
      }
    }
  }
}

TEST(Rounding, ReproducesEveryNumberOfTheFormat) {
  for (const Format& format : kFormats) {
    for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      if ((half & 0x7fff) > format.infinity) continue;
      ASSERT_EQ(format.round(static_cast<float>(format.value(half))), half) << format.name;
    }
  }
}

// The numbers have all exponents and leading mantissa bits, with low bits that round down, tie, and round up.
TEST(Rounding, RoundingIsMonotonicOverAllUpperHalves) {
  for (const Format& format : kFormats) {
    int previous = -1;
    for (std::uint32_t upper = 0; upper < 0x7f80; ++upper) {
      for (std::uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
        const int rounded = format.round(std::bit_cast<float>(upper << 16 | low));
        ASSERT_GE(rounded, previous) << format.name << " at " << std::hex << (upper << 16 | low);
        previous = rounded;
      }
    }
    EXPECT_EQ(previous, format.infinity) << format.name;
  }
}

TEST(Rounding, KeepsEveryKindOfNaNAndInfinity) {
  for (const Format& format : kFormats) {
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      EXPECT_EQ(format.round(std::bit_cast<float>(sign | 0x7f800000u)), format.infinity | sign >> 16);
      for (std::uint32_t bit = 0; bit < 23; ++bit) {  // these include NaN payloads whose bits are all dropped
        const std::uint16_t half = format.round(std::bit_cast<float>(sign | 0x7f800000u | 1u << bit));
        EXPECT_GT(half & 0x7fff, format.infinity) << format.name << " payload bit " << bit;
        EXPECT_EQ(half & 0x8000, static_cast<int>(sign >> 16));
      }
    }
  }
}

// Rounding is unbiased by definition: the mean of the results over all noise is exactly the value.
TEST(StochasticRounding, MeanIsTheValue) {
  for (float value : {1.0f, 1.00390625f, 3.14159274f, 1e-30f, 1e-40f, 123456.789f, 0.0f, 2.9387359e-39f}) {
    for (float signed_value : {value, -value}) {
      double sum = 0.0;
      for (std::uint32_t noise = 0; noise < 65536; ++noise) {
        sum += value_of_bf16(static_cast<std::uint16_t>(bf16_stochastic(signed_value, noise) >> 16));
      }
      EXPECT_EQ(sum / 65536.0, static_cast<double>(signed_value));
    }
  }
}

TEST(StochasticRounding, KeepsInfinity) {
  for (std::uint32_t noise : {0u, 1u, 0x8000u, 0xffffu}) {
    EXPECT_EQ(bf16_stochastic(HUGE_VALF, noise) >> 16, 0x7f80u);
    EXPECT_EQ(bf16_stochastic(-HUGE_VALF, noise) >> 16, 0xff80u);
  }
}

// The numbers cover every upper half. Their low bits lie around both values at which rounding changes the high half.
TEST(SplitMaster, JoinedHalvesGiveTheSameBits) {
  for (std::uint32_t upper = 0; upper <= 0xffff; ++upper) {
    for (std::uint32_t lower : {0x0000u, 0x0001u, 0x1234u, 0x7ffeu, 0x7fffu, 0x8000u, 0x8001u, 0xfffeu, 0xffffu}) {
      const std::uint32_t bits = upper << 16 | lower;
      const float value = std::bit_cast<float>(bits);
      const auto split = splittable<std::uint32_t>(value);
      const auto high = static_cast<std::uint16_t>(split_high(split));
      const auto low = static_cast<std::int16_t>(split_low(split));
      const std::uint32_t back = join_split<std::uint32_t>(high, static_cast<std::uint32_t>(std::int32_t{low}));
      if (std::isnan(value)) {
        ASSERT_EQ(back, 0x7fc00000u) << std::hex << bits;
        ASSERT_EQ(high, 0x7fc0u) << std::hex << bits;
        continue;
      }
      ASSERT_EQ(back, bits) << std::hex << bits;
      const bool tie = lower == 0x8000;
      ASSERT_EQ(high, tie ? static_cast<std::uint16_t>(upper + 1) : to_bf16(value)) << std::hex << bits;
    }
  }
}

}  // namespace
}  // namespace tessera
