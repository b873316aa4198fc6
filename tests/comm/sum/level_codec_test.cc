// Tests the codec that rounds values to evenly spaced levels at random.

#include "runtime/comm/sum/level_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/random_numbers.h"

namespace tessera {
namespace {

using testing::random_numbers;
using Numbers = std::vector<float>;

Numbers sent(LevelForm form, const Numbers& values, NoiseKey key) {
  std::vector<std::uint32_t> message(level_words(form.levels, values.size()) + 1, 0xabcdu);
  encode_levels(form, values.data(), values.size(), key, message.data());
  EXPECT_EQ(message.back(), 0xabcdu) << "written beyond the message";
  Numbers output(values.size(), 0.0f);
  add_levels(form, message.data(), values.size(), output.data());
  return output;
}

double norm_of(LevelForm form, const Numbers& values, std::size_t begin) {
  double squares = 0, most = 0;
  for (std::size_t i = begin; i < std::min(values.size(), begin + kMessageRun); ++i) {
    squares += static_cast<double>(values[i]) * values[i];
    most = std::max(most, std::fabs(static_cast<double>(values[i])));
  }
  return form.norm == LevelNorm::kSquares ? std::sqrt(squares) : most;
}

constexpr LevelForm kForms[] = {{1, LevelNorm::kMagnitude},  {1, LevelNorm::kSquares}, {2, LevelNorm::kSquares},
                                {7, LevelNorm::kSquares},    {8, LevelNorm::kSquares}, {100, LevelNorm::kSquares},
                                {127, LevelNorm::kMagnitude}};

TEST(LevelCodec, DrawsOneOfTheTwoNearestLevels) {
  for (const LevelForm form : kForms) {
    for (const std::size_t numel : {1u, 17u, 256u, 700u}) {
      const Numbers values = random_numbers(numel, 3), output = sent(form, values, noise_key(1, 2));
      for (std::size_t i = 0; i < numel; ++i) {
        const double unit = norm_of(form, values, i / kMessageRun * kMessageRun) / static_cast<double>(form.levels);
        const double level = output[i] / unit;
        EXPECT_NEAR(level, std::round(level), 1e-4);
        EXPECT_LE(std::fabs(output[i] - values[i]), unit * 1.0001);
        EXPECT_LE(std::fabs(std::round(level)), form.levels);
        EXPECT_TRUE(output[i] == 0 || std::signbit(output[i]) == std::signbit(values[i]));
      }
    }
  }
}

// The mean of n draws is off by less than 5 of its standard deviations, which are at most unit / (2 sqrt(n)).
TEST(LevelCodec, MeanOfDrawsIsTheValue) {
  constexpr int kDraws = 4000;
  for (const LevelForm form : kForms) {
    const Numbers values = random_numbers(300, 3);
    std::vector<double> sum(values.size());
    for (int step = 0; step < kDraws; ++step) {
      const Numbers output = sent(form, values, noise_key(9, step));
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += output[i];
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const double unit = norm_of(form, values, i / kMessageRun * kMessageRun) / static_cast<double>(form.levels);
      EXPECT_NEAR(sum[i] / kDraws, values[i], 5 * unit / (2 * std::sqrt(kDraws))) << i << ", " << form.levels;
    }
  }
}

TEST(LevelCodec, NonFiniteRunStaysNonFinite) {
  for (const LevelForm form : kForms) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Numbers values = random_numbers(600, 3);
      values[300] = bad;
      const Numbers output = sent(form, values, noise_key(1, 1));
      EXPECT_TRUE(std::isfinite(output[255]));
      EXPECT_FALSE(std::isfinite(output[256]));
    }
    EXPECT_EQ(sent(form, Numbers(300, 0.0f), noise_key(1, 1)), Numbers(300, 0.0f));
  }
}

}  // namespace
}  // namespace tessera
