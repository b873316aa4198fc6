#pragma once

// See docs/glossary.md: flat group.

#include <cstdint>

#include "runtime/base/always_inline.h"

namespace tessera {

/// Random bits for stochastic rounding, of optimizer states and of gradients on the wire. They are a pure function of
/// (group, step, element). No generator has a state, so results do not depend on threads, on how a group is cut into
/// shards, or on the number of ranks. The function uses integer operations of 32 bits only, which give the same results
/// on CPU vectors and on a GPU.
///
/// Group and step are mixed into one word, once for each call. A multiple of an odd constant is added to that word for
/// each element (Weyl's sequence), and the sum goes through one shift, xor and multiplication. A rounding loop spends
/// as much time on this noise as on the rounding itself. All keys read the same cycle of 2^32 numbers, but begin at
/// different points of it. If the ranges of two keys overlap, both keys give the same numbers, but to different
/// elements or steps, whose rounding errors are unrelated anyway.
struct NoiseKey {
  std::uint32_t start = 0;
};

/// The version of `noise_at`, and of the rounding of states by its noise. Checkpoints store it, since a run that
/// continues under another version draws other numbers. Version 1 used another factor and two more operations. Version
/// 2 rounded 8-bit states differently, and allowed smaller and larger block scales.
inline constexpr std::int64_t kNoiseVersion = 3;

/// A bijection of 64 bits in which every input bit reaches every output bit: the finaliser of SplitMix64 (Steele, Lea
/// and Flood, OOPSLA 2014, section 6).
TESSERA_ALWAYS_INLINE std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// `stream` names the flat group, and `step` counts from 1.
TESSERA_ALWAYS_INLINE NoiseKey noise_key(std::uint64_t stream, std::int64_t step) {
  constexpr std::uint64_t kSeed = 0x9e3779b97f4a7c15u;  // this is 2^64 over the golden ratio
  const std::uint64_t key = mix_bits(mix_bits(stream + kSeed) + static_cast<std::uint64_t>(step) * kSeed);
  return {.start = static_cast<std::uint32_t>(key)};
}

inline constexpr std::uint32_t kNoiseStride = 0x9e3779b1u;  // the prime next to 2^32 over the golden ratio

/// The last step of `noise_at`, for loops that compute `strides + key.start` themselves. The factor was chosen by
/// trial. It shows no correlation at any lag up to 300 elements, within either half of the bits or between the halves
/// (tests/base/noise_test.cc checks a sample). Other well-known factors fail at some lag.
template <class Bits>
TESSERA_ALWAYS_INLINE Bits mix_noise(Bits x) {
  return (x ^ (x >> 16)) * 0xac564b05u;
}

/// Returns 32 bits for one element of the group, or for a vector of elements. `strides` is kNoiseStride * element,
/// modulo 2^32. If two numbers of one element are rounded, each takes up to 16 bits (`own_noise`). Elements that are
/// 2^32 apart get the same bits.
template <class Bits>
TESSERA_ALWAYS_INLINE Bits noise_at(NoiseKey key, Bits strides) {
  return mix_noise(strides + key.start);
}

/// Returns `kBits` bits (at most 16) of an element's noise, for the first or the second number that it rounds.
template <bool kIsFirst, int kBits, class Bits>
TESSERA_ALWAYS_INLINE Bits own_noise(Bits noise) {
  return kIsFirst ? noise & ((1u << kBits) - 1) : noise >> (32 - kBits);
}

}  // namespace tessera
