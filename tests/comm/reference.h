#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

// Computes the expected sums, as slowly and plainly as possible.

using Bytes = std::vector<std::byte>;

/// Returns the value of a 16-bit float from its fields, by the definition of the format.
inline float widen_slowly(DType dtype, std::uint16_t bits) {
  const int mantissa_bits = dtype == DType::kF16 ? 10 : 7;
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  const int mantissa = bits & ((1 << mantissa_bits) - 1), exponent = (bits >> mantissa_bits) & top;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == top && mantissa != 0) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == top) return static_cast<float>(sign * std::numeric_limits<double>::infinity());
  const double fraction = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return static_cast<float>(sign * std::ldexp(fraction, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits));
}

inline float value_at(const Bytes& data, DType dtype, std::size_t i) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data.data() + 4 * i, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, data.data() + 2 * i, 2);
  return widen_slowly(dtype, bits);
}

/// Returns finite values of many magnitudes, so that the order of summation shows in the bits.
inline Bytes random_values(DType dtype, std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  Bytes data(numel * size_of(dtype));
  for (std::size_t i = 0; i < numel; ++i) {
    if (dtype == DType::kF32) {
      const float value =
          std::ldexp(static_cast<float>(random() >> 8) - 8388608.0f, static_cast<int>(random() % 24) - 24);
      std::memcpy(data.data() + 4 * i, &value, 4);
    } else {
      auto bits = static_cast<std::uint16_t>(random());
      while (!std::isfinite(widen_slowly(dtype, bits)) || std::fabs(widen_slowly(dtype, bits)) > 1e30f)
        bits = static_cast<std::uint16_t>(random());
      std::memcpy(data.data() + 2 * i, &bits, 2);
    }
  }
  return data;
}

/// Adds values exactly as rule 3 of collectives.h says. Neighbours are added, and a last value without a neighbour goes
/// up to the next level, until one value is left.
inline float tree_of(std::vector<float> values) {
  while (values.size() > 1) {
    std::vector<float> next;
    for (std::size_t i = 0; i + 1 < values.size(); i += 2) next.push_back(values[i] + values[i + 1]);
    if (values.size() % 2 == 1) next.push_back(values.back());
    values = next;
  }
  return values[0];
}

/// Returns elements [begin, begin + numel) of the sum of all inputs.
inline std::vector<float> reference_sum(const std::vector<Bytes>& inputs, DType dtype, std::size_t begin,
                                        std::size_t numel) {
  std::vector<float> sums(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    std::vector<float> addends;
    for (const Bytes& input : inputs) addends.push_back(value_at(input, dtype, begin + i));
    sums[i] = tree_of(addends);
  }
  return sums;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace tessera
