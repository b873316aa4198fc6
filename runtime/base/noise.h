#pragma once

#include <cstdint>

#include "runtime/base/always_inline.h"

namespace tessera {

/// Random bits for stochastic rounding, of optimizer states and of gradients on the wire, that are a pure function of (group, step,
/// element): no generator has a state, so results do not depend on threads, on how a group is cut into shards, or on the
/// number of ranks. Integer operations of 32 bits only, the same on CPU vectors and on a GPU.
///
/// Group and step are mixed into two words once a call; for an element a multiple of an odd constant (Weyl's sequence)
/// is added to one, and the sum goes through xor, shift and multiplication, with the other word in between.
struct NoiseKey {
  std::uint32_t start = 0;
  std::uint32_t twist = 0;
};

/// A bijection of 64 bits in which every input bit reaches every output bit: the finaliser of SplitMix64 (Steele, Lea
/// and Flood, OOPSLA 2014, section 6).
TESSERA_ALWAYS_INLINE std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// `stream` names the flat group, `step` counts from 1.
TESSERA_ALWAYS_INLINE NoiseKey noise_key(std::uint64_t stream, std::int64_t step) {
  constexpr std::uint64_t kSeed = 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio
  const std::uint64_t key = mix_bits(mix_bits(stream + kSeed) + static_cast<std::uint64_t>(step) * kSeed);
  return {.start = static_cast<std::uint32_t>(key), .twist = static_cast<std::uint32_t>(key >> 32)};
}

inline constexpr std::uint32_t kNoiseStride = 0x9e3779b1u;  // the prime next to 2^32 over the golden ratio

/// 32 bits for one element of the group, or for a vector of elements: `strides` is kNoiseStride * element, modulo 2^32.
/// Two numbers of one element that are both rounded take 16 bits each. Elements 2^32 apart get the same.
template <class Bits>
TESSERA_ALWAYS_INLINE Bits noise_at(NoiseKey key, Bits strides) {
  Bits x = strides + key.start;
  x = (x ^ (x >> 16) ^ key.twist) * 0x21f0aaadu;
  return x ^ (x >> 15);
}

}  // namespace tessera
