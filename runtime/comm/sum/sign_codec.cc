#include "runtime/comm/sum/sign_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "runtime/base/wire/sign_messages.h"
#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {
namespace {

constexpr std::size_t kWordBits = 32;
constexpr std::size_t kWords = kMessageRun / kWordBits;  // number of words with the bits of a run
/// Number of partial sums in the sum over a run. They are added up at the end.
constexpr std::size_t kLanes = 16;
constexpr std::uint32_t kSignBit = 0x80000000u, kInfinity = 0x7f800000u;

TESSERA_INLINE std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

TESSERA_INLINE float mean_magnitude(const float* values, std::size_t numel) {
  std::array<float, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k) sums[k] += std::fabs(values[i + k]);
  }
  for (std::size_t k = 0; i + k < numel; ++k) sums[k] += std::fabs(values[i + k]);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0] / static_cast<float>(numel);
}

TESSERA_INLINE std::uint32_t signs_of(const float* values, std::size_t numel) {
  std::uint32_t word = 0;
  for (std::size_t j = 0; j < numel; ++j) word |= bits_of(values[j]) >> 31 << j;
  return word;
}

/// Calls `each(word, begin, numel)` for the words of a run of `numel` elements. A whole run has loops of constant
/// length, which vectorise.
template <class Each>
TESSERA_INLINE void for_words(std::size_t numel, const Each& each) {
  if (numel == kMessageRun) {
    for (std::size_t w = 0; w < kWords; ++w) each(w, w * kWordBits, kWordBits);
    return;
  }
  for (std::size_t w = 0; w < kWords; ++w) {
    const std::size_t begin = w * kWordBits;
    each(w, begin, begin < numel ? std::min(kWordBits, numel - begin) : 0);
  }
}

/// Calls `take(i, value)` for each element i of a run. `value` is `magnitude` with the sign that `words` has for
/// element i.
template <class Take>
TESSERA_INLINE void signed_run(float magnitude, const std::uint32_t* words, std::size_t numel, const Take& take) {
  for_words(
      numel, [&](std::size_t w, std::size_t begin, std::size_t count) __attribute__((always_inline)) {
        for (std::size_t j = 0; j < count; ++j) take(begin + j, with_sign(magnitude, words[w], j));
      });
}

TESSERA_INLINE void encode_run(float* values, std::size_t numel, std::uint32_t* message) {
  const float scale = mean_magnitude(values, numel);
  message[0] = bits_of(scale);
  for_words(
      numel, [&](std::size_t w, std::size_t begin, std::size_t count) __attribute__((always_inline)) {
        const std::uint32_t word = signs_of(values + begin, count);
        message[1 + w] = word;
        for (std::size_t j = 0; j < count; ++j) values[begin + j] -= with_sign(scale, word, j);
      });
}

}  // namespace

TESSERA_CPU_CLONES void encode_signs(float* values, const float* more, std::size_t numel, std::uint32_t* message) {
  for (std::size_t begin = 0; begin < numel; begin += kMessageRun, message += 1 + kWords) {
    const std::size_t count = std::min(kMessageRun, numel - begin);
    if (more) {
      for (std::size_t i = begin; i < begin + count; ++i) values[i] += more[i];
    }
    encode_run(values + begin, count, message);
  }
}

TESSERA_CPU_CLONES void decode_signs(const std::uint32_t* message, std::size_t numel, float* output) {
  for (std::size_t at = 0; at < numel; at += kMessageRun, message += 1 + kWords)
    signed_run(
        std::bit_cast<float>(message[0]), message + 1,
        std::min(kMessageRun, numel - at), [&](std::size_t i, float value) __attribute__((always_inline)) {
          output[at + i] = value;
        });
}

TESSERA_CPU_CLONES void add_signs(const std::uint32_t* message, std::size_t numel, float* output) {
  for (std::size_t at = 0; at < numel; at += kMessageRun, message += 1 + kWords)
    signed_run(
        std::bit_cast<float>(message[0]), message + 1,
        std::min(kMessageRun, numel - at), [&](std::size_t i, float value) __attribute__((always_inline)) {
          output[at + i] += value;
        });
}

TESSERA_CPU_CLONES void cast_votes(const float* values, std::size_t numel, std::uint64_t turn, std::uint32_t* votes) {
  const std::uint32_t of_zero = votes_of_zeros(turn);
  std::uint32_t largest = 0;
  std::uint32_t* words = votes + 1;
  for (std::size_t at = 0; at < numel; at += kMessageRun, words += kWords) {
    for_words(
        std::min(kMessageRun, numel - at), [&](std::size_t w, std::size_t begin,
                                               std::size_t count) __attribute__((always_inline)) {
          std::uint32_t negative = 0, zero = 0, most = 0;
          for (std::size_t j = 0; j < count; ++j) {
            const std::uint32_t bits = bits_of(values[at + begin + j]), magnitude = bits & ~kSignBit;
            negative |= bits >> 31 << j;
            zero |= (magnitude - 1) >> 31 << j;
            most = std::max(most, magnitude);
          }
          largest = std::max(largest, most);
          words[w] = vote_word(negative, zero, of_zero);
        });
  }
  votes[0] = largest >= kInfinity ? 1 : 0;
}

TESSERA_CPU_CLONES void count_votes(const std::uint32_t* votes, std::size_t voters, std::size_t numel,
                                    std::uint64_t turn, std::uint32_t* result) {
  const std::size_t words = vote_words(numel);
  const auto needed = static_cast<std::int32_t>(voters);
  const std::uint32_t of_tie = votes_of_zeros(turn);
  result[0] = 0;
  for (std::size_t r = 0; r < voters; ++r) result[0] |= votes[r * words];
  for (std::size_t w = 1; w < words; ++w) {
    std::array<std::int32_t, kWordBits> negative{};
    for (std::size_t r = 0; r < voters; ++r) {
      const std::uint32_t word = votes[r * words + w];
      for (std::size_t j = 0; j < kWordBits; ++j) negative[j] += static_cast<std::int32_t>(word >> j & 1);
    }
    std::uint32_t most = 0, tie = 0;
    for (std::size_t j = 0; j < kWordBits; ++j) {
      most |= static_cast<std::uint32_t>(2 * negative[j] > needed) << j;
      tie |= static_cast<std::uint32_t>(2 * negative[j] == needed) << j;
    }
    result[w] = most | (tie & of_tie);
  }
}

TESSERA_CPU_CLONES void decode_votes(const std::uint32_t* votes, std::size_t numel, float magnitude, float* output) {
  const std::uint32_t* words = votes + 1;
  for (std::size_t at = 0; at < numel; at += kMessageRun, words += kWords)
    signed_run(
        magnitude, words,
        std::min(kMessageRun, numel - at), [&](std::size_t i, float value) __attribute__((always_inline)) {
          output[at + i] = value;
        });
  if (votes[0] != 0 && numel > 0) output[0] = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace tessera
