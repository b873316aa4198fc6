#pragma once

#include <cstdint>

#include "optim/instruction_set.h"

namespace tessera {

/// Random bits for stochastic rounding that are a pure function of (group, step, element): no generator has a state, so
/// results do not depend on threads, on how a group is cut into shards, or on the number of ranks. Integer operations
/// of 32 bits only, the same on CPU vectors and on a GPU.
///
/// Group and step are mixed into two words once a call; an element costs two multiplications. Each of the two words
/// enters at another place, so two steps' noise is not one sequence seen from two starting points.
struct NoiseKey {
  std::uint32_t before = 0;
  std::uint32_t between = 0;
};

/// `stream` names the flat group, `step` counts from 1.
NoiseKey noise_key(std::uint64_t stream, std::int64_t step);

/// 32 bits for one element of the group, or for a vector of elements (`Bits`: std::uint32_t or Simd::Bits). Two numbers
/// of one element that are both rounded take 16 bits each. Elements 2^32 apart get the same. The multipliers and
/// shifts are those of a bijection of 32 bits that was found by search for small avalanche bias (C. Wellons,
/// "Prospecting for Hash Functions", 2018: lowbias32, later constants).
template <class Bits>
TESSERA_ALWAYS_INLINE Bits noise_at(NoiseKey key, Bits element) {
  Bits x = element ^ key.before;
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = x ^ key.between;
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return x ^ (x >> 15);
}

}  // namespace tessera
