// Compares messages of signs by CUDA kernels with those of the CPU's loops. The bits are the same.

#include "optim/cuda/device_signs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "runtime/base/message_words.h"
#include "runtime/comm/sum/sign_codec.h"
#include "tests/optim/device_memory.h"

namespace tessera {
namespace device_signs_test {

using DeviceSigns = DeviceKernels;
using Words = std::vector<std::uint32_t>;
using Kind = SignMessages::Kind;

/// Returns numbers of many magnitudes, with zeros of both signs.
std::vector<float> numbers(std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-30, 6);
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i)
    values[i] = i % 7 == 2 ? (i % 2 == 0 ? 0.0f : -0.0f) : std::ldexp(normal(random), exponent(random));
  return values;
}

/// Returns the messages of `parts` owners, whose parts are whole runs, and may be empty.
SignMessages messages_of(Kind kind, std::size_t numel, std::size_t parts) {
  const std::size_t runs = (message_runs(numel) + parts - 1) / parts;
  const std::size_t part_numel = parts == 1 ? numel : runs * kMessageRun;
  const std::size_t words = kind == Kind::kVotes ? vote_words(part_numel) : scaled_sign_words(part_numel);
  return {kind, numel, parts, part_numel, words};
}

/// Returns the messages that the CPU makes; `kept` is as in SignMessages.
Words made_by_the_cpu(const SignMessages& how, const std::vector<float>& values, float* kept) {
  Words words(how.parts * how.part_words);
  for (std::size_t q = 0; q < how.parts; ++q) {
    const std::size_t begin = std::min(q * how.part_numel, how.numel);
    const std::size_t count = std::min(how.part_numel, how.numel - begin);
    std::uint32_t* const message = words.data() + q * how.part_words;
    how.kind == Kind::kVotes ? cast_votes(values.data() + begin, count, how.turn, message)
                             : encode_signs(kept + begin, values.data() + begin, count, message);
  }
  return words;
}

struct SignCase {
  std::size_t numel, parts;
};
constexpr SignCase kSignCases[] = {{1, 1}, {64, 1}, {64, 3}, {255, 1}, {256, 2}, {1000, 1}, {1344, 3}, {20032, 4}};

TEST_F(DeviceSigns, VotesHaveTheCpusBits) {
  for (const auto& [numel, parts] : kSignCases) {
    for (const std::uint64_t turn : {6, 7}) {
      for (const bool is_finite : {true, false}) {
        SCOPED_TRACE(std::to_string(numel) + " in " + std::to_string(parts) + " parts, turn " + std::to_string(turn));
        std::vector<float> data = numbers(numel, 3);
        if (!is_finite) data[numel / 2] = -std::numeric_limits<float>::infinity();
        SignMessages how = messages_of(Kind::kVotes, numel, parts);
        how.turn = turn;
        const Shared<float> values(data);
        const Shared<std::uint32_t> messages(Words(how.parts * how.part_words + 1, 0xabcdu));
        check(cuda::encode_sign_messages(how, values.data(), messages.data(), 4, nullptr));
        Words wanted = made_by_the_cpu(how, data, nullptr);
        wanted.push_back(0xabcdu);  // the word behind the messages does not change
        EXPECT_EQ(messages.values(), wanted);
      }
    }
  }
}

TEST_F(DeviceSigns, ScaledMessagesAndResidualsHaveTheCpusBits) {
  for (const auto& [numel, parts] : kSignCases) {
    SCOPED_TRACE(std::to_string(numel) + " in " + std::to_string(parts) + " parts");
    const std::vector<float> data = numbers(numel, 4);
    std::vector<float> wanted_kept = numbers(numel, 5);
    SignMessages how = messages_of(Kind::kScaled, numel, parts);
    const Shared<float> values(data), kept(wanted_kept);
    const Shared<std::uint32_t> messages(Words(how.parts * how.part_words + 1, 0xabcdu));
    how.kept = kept.data();
    for (int time = 0; time < 2; ++time) {
      check(cuda::encode_sign_messages(how, values.data(), messages.data(), 4, nullptr));
      Words wanted = made_by_the_cpu(how, data, wanted_kept.data());
      wanted.push_back(0xabcdu);
      EXPECT_EQ(messages.values(), wanted);
      EXPECT_EQ(std::memcmp(kept.values().data(), wanted_kept.data(), 4 * numel), 0);
    }
  }
}

}  // namespace device_signs_test
}  // namespace tessera
