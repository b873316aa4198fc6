// Tests the codec that sends signs and one scale, and the counting of votes.

#include "runtime/comm/sum/sign_codec.h"

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
using Words = std::vector<std::uint32_t>;
constexpr std::size_t kSizes[] = {1, 31, 32, 33, 255, 256, 257, 1000};

TEST(SignCodec, SendsMeanMagnitudeWithSignsAndKeepsTheRest) {
  for (const std::size_t numel : kSizes) {
    const Numbers values = random_numbers(numel, 1), more = random_numbers(numel, 2);
    Numbers kept = values, sent(numel), added = more;
    Words message(scaled_sign_words(numel) + 1, 0xabcdu);
    encode_signs(kept.data(), more.data(), numel, message.data());
    EXPECT_EQ(message.back(), 0xabcdu) << "written beyond the message";
    decode_signs(message.data(), numel, sent.data());
    add_signs(message.data(), numel, added.data());
    for (std::size_t begin = 0; begin < numel; begin += kMessageRun) {
      const std::size_t end = std::min(numel, begin + kMessageRun);
      double mean = 0;
      for (std::size_t i = begin; i < end; ++i) mean += std::fabs(values[i] + more[i]);
      mean /= static_cast<double>(end - begin);
      for (std::size_t i = begin; i < end; ++i) {
        const float wanted = values[i] + more[i];
        EXPECT_NEAR(std::fabs(sent[i]), mean, 1e-5 * mean);
        EXPECT_EQ(std::fabs(sent[i]), std::fabs(sent[begin])) << "a run has one magnitude";
        EXPECT_EQ(std::signbit(sent[i]), std::signbit(wanted));
        EXPECT_EQ(kept[i], wanted - sent[i]);
        EXPECT_EQ(added[i], more[i] + sent[i]);
      }
    }
  }
}

TEST(SignCodec, NonFiniteValueMakesItsRunsScaleNonFinite) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Numbers values = random_numbers(600, 3), sent(600);
    values[300] = bad;
    Words message(scaled_sign_words(600));
    encode_signs(values.data(), nullptr, 600, message.data());
    decode_signs(message.data(), 600, sent.data());
    EXPECT_TRUE(std::isfinite(sent[0]));
    EXPECT_FALSE(std::isfinite(sent[256]));
  }
}

bool votes_minus_at_zero(std::size_t place, std::uint64_t turn) { return (place + turn) % 2 == 1; }

TEST(SignCodec, MajorityOfVotesDecidesTheSign) {
  for (const std::size_t numel : kSizes) {
    for (const std::size_t voters : {1u, 2u, 3u, 4u}) {
      for (const std::uint64_t turn : {6u, 7u}) {
        std::vector<Numbers> values;
        Words votes(voters * vote_words(numel)), result(vote_words(numel));
        for (std::size_t r = 0; r < voters; ++r) {
          values.push_back(random_numbers(numel, static_cast<unsigned>(10 + r)));
          for (std::size_t i = 0; i < numel; i += 3) values[r][i] = i % 2 == 0 ? 0.0f : -0.0f;
          cast_votes(values[r].data(), numel, turn, &votes[r * vote_words(numel)]);
        }
        count_votes(votes.data(), voters, numel, turn, result.data());
        Numbers output(numel);
        decode_votes(result.data(), numel, 2.5f, output.data());
        for (std::size_t i = 0; i < numel; ++i) {
          std::size_t minus = 0;
          for (const Numbers& own : values) minus += own[i] == 0 ? votes_minus_at_zero(i, turn) : own[i] < 0;
          const bool wanted = 2 * minus == voters ? votes_minus_at_zero(i, turn) : 2 * minus > voters;
          EXPECT_EQ(output[i], wanted ? -2.5f : 2.5f) << i << " of " << numel << ", " << voters << " voters";
        }
      }
    }
  }
}

TEST(SignCodec, NonFiniteVoterMakesTheResultNaN) {
  Numbers values = random_numbers(300, 5), output(300);
  values[299] = std::numeric_limits<float>::infinity();
  Words votes(2 * vote_words(300)), result(vote_words(300));
  cast_votes(values.data(), 300, 1, votes.data());
  values[299] = 0;
  cast_votes(values.data(), 300, 1, &votes[vote_words(300)]);
  count_votes(votes.data(), 2, 300, 1, result.data());
  decode_votes(result.data(), 300, 1, output.data());
  EXPECT_TRUE(std::isnan(output[0]));
}

}  // namespace
}  // namespace tessera
