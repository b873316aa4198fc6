#pragma once

#include <bit>
#include <cstdint>

#include "optim/instruction_set.h"

namespace tessera {

// Rounding of fp32 to 16-bit formats: to nearest, ties to even, as IEEE 754 and LibTorch round. Integer arithmetic
// without branches, so that compilers vectorise it and every instruction set gives the same bits. Values too large
// become infinity. A NaN stays a NaN: its sign and leading payload bits are kept and the quiet bit is set, since
// dropping the low bits of a NaN whose payload lies there would otherwise leave an infinity.

/// bf16 is the upper half of fp32: sign, 8 exponent bits, 7 mantissa bits. Subnormals are rounded, not flushed.
TESSERA_ALWAYS_INLINE std::uint16_t round_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : nearest);
}

/// fp16: sign, 5 exponent bits (bias 15), 10 mantissa bits. Three ranges, each right only in its own:
///  - normal results: the exponent is rebiased by 127 - 15 = 112 while 13 mantissa bits are rounded away; what
///    carries beyond the largest finite number is clamped to infinity;
///  - results below 2^-14: adding 0.5 makes the adder round to the subnormals' spacing of 2^-24, since numbers in
///    [0.5, 1) lie 2^-24 apart;
///  - NaN.
TESSERA_ALWAYS_INLINE std::uint16_t round_to_fp16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;

  const std::uint32_t rounded = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t rebiased = rounded - (112u << 10);
  const std::uint32_t normal = rebiased > 0x7c00u ? 0x7c00u : rebiased;
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<std::uint32_t>(0.5f);
  const std::uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);

  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude > 0x7f800000u ? quiet_nan : result;
  return static_cast<std::uint16_t>(sign | result);
}

}  // namespace tessera
