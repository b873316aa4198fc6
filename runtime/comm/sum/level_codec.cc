#include "runtime/comm/sum/level_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <span>

#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::uint32_t kMagnitudeBits = 0x7fffffffu;
using Codes = std::array<std::int32_t, kMessageRun>;

TESSERA_INLINE float norm_of_squares(const float* values, std::size_t numel) {
  std::array<double, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t k = 0; k < kLanes; ++k)
      sums[k] += static_cast<double>(values[i + k]) * static_cast<double>(values[i + k]);
  }
  for (std::size_t k = 0; i + k < numel; ++k)
    sums[k] += static_cast<double>(values[i + k]) * static_cast<double>(values[i + k]);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return static_cast<float>(std::sqrt(sums[0]));
}

/// Compares magnitudes by their bits. The bits of a NaN are the largest.
TESSERA_INLINE float largest_magnitude(const float* values, std::size_t numel) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < numel; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & kMagnitudeBits);
  return std::bit_cast<float>(largest);
}

TESSERA_INLINE void round_run(std::span<const float> run, float norm, std::int64_t levels, NoiseKey key,
                              std::uint32_t first, Codes& codes) {
  codes = {};
  if (!(norm > 0) || !std::isfinite(norm)) return;
  const float* const values = run.data();
  const std::size_t numel = run.size();
  const float most = static_cast<float>(levels);
  for (std::size_t i = 0; i < numel; ++i) {
    constexpr float kUnit = 1.0f / (1 << 24);
    const std::uint32_t noise = noise_at(key, (first + static_cast<std::uint32_t>(i)) * kNoiseStride);
    const float random = static_cast<float>(static_cast<std::int32_t>(noise >> 8)) * kUnit;
    const float level = std::min(std::fabs(values[i]) / norm * most + random, most);
    const auto code = static_cast<std::int32_t>(level);
    codes[i] = std::bit_cast<std::int32_t>(values[i]) < 0 ? -code : code;
  }
}

/// The k-th code of a word is `kWords` codes behind the code before it, so that several words are made at the same
/// time.
template <std::size_t kBits>
struct Packing {
  static constexpr std::size_t kInWord = 32 / kBits, kWords = kMessageRun / kInWord;
  static constexpr std::uint32_t kMask = (1u << kBits) - 1;

  TESSERA_INLINE static void pack(const Codes& codes, std::uint32_t* words) {
    for (std::size_t w = 0; w < kWords; ++w) words[w] = 0;
    for (std::size_t k = 0; k < kInWord; ++k) {
      for (std::size_t w = 0; w < kWords; ++w)
        words[w] |= (static_cast<std::uint32_t>(codes[k * kWords + w]) & kMask) << (k * kBits);
    }
  }
  TESSERA_INLINE static void unpack(const std::uint32_t* words, Codes& codes) {
    for (std::size_t k = 0; k < kInWord; ++k) {
      for (std::size_t w = 0; w < kWords; ++w)
        codes[k * kWords + w] =
            static_cast<std::int32_t>(words[w] << (32 - kBits - k * kBits)) >> static_cast<int>(32 - kBits);
    }
  }
};

template <class Each>
TESSERA_INLINE void with_packing(std::int64_t levels, const Each& each) {
  switch (level_bits(levels)) {
    case 2:
      return each(Packing<2>());
    case 4:
      return each(Packing<4>());
    default:
      return each(Packing<8>());
  }
}

}  // namespace

TESSERA_CPU_CLONES void encode_levels(LevelForm form, const float* values, std::size_t numel, NoiseKey key,
                                      std::uint32_t* message) {
  with_packing(
      form.levels, [&](auto packing) __attribute__((always_inline)) {
        for (std::size_t at = 0; at < numel; at += kMessageRun, message += 1 + packing.kWords) {
          const std::size_t count = std::min(kMessageRun, numel - at);
          const float* const run = values + at;
          const float norm =
              form.norm == LevelNorm::kSquares ? norm_of_squares(run, count) : largest_magnitude(run, count);
          Codes codes;
          round_run({run, count}, norm, form.levels, key, static_cast<std::uint32_t>(at), codes);
          message[0] = std::bit_cast<std::uint32_t>(norm);
          packing.pack(codes, message + 1);
        }
      });
}

TESSERA_CPU_CLONES void add_levels(LevelForm form, const std::uint32_t* message, std::size_t numel, float* output) {
  with_packing(
      form.levels, [&](auto packing) __attribute__((always_inline)) {
        for (std::size_t at = 0; at < numel; at += kMessageRun, message += 1 + packing.kWords) {
          const float unit = std::bit_cast<float>(message[0]) / static_cast<float>(form.levels);
          Codes codes;
          packing.unpack(message + 1, codes);
          const std::size_t count = std::min(kMessageRun, numel - at);
          for (std::size_t i = 0; i < count; ++i) output[at + i] += static_cast<float>(codes[i]) * unit;
        }
      });
}

}  // namespace tessera
