#pragma once

#include <bit>
#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// These functions convert fp32 numbers to narrower formats. They use integer arithmetic without branches, on the bits
// of one number (`Bits` = std::uint32_t, `Float` = float) or of a vector of numbers (Simd::Bits, Simd::Float). So every
// instruction set gives the same bits. A NaN stays a NaN, but needs special treatment. A NaN whose payload lies in the
// low bits would become an infinity when these bits are dropped. A NaN whose payload is all ones would become zero by
// rounding up.

/// bf16 is the upper half of fp32: sign, 8 exponent bits, 7 mantissa bits. Rounds to nearest, ties to even, as IEEE 754
/// and LibTorch do. Values that are too large become infinity, and subnormals are rounded, not flushed. A NaN keeps its
/// sign and leading payload bits, and becomes quiet. The result is in the low 16 bits.
template <class Bits, class Float>
TESSERA_ALWAYS_INLINE Bits bf16_nearest(Float value) {
  const Bits bits = __builtin_bit_cast(Bits, value);
  const Bits nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits quiet_nan = (bits >> 16) | 0x0040u;
  return value != value ? quiet_nan : nearest;
}

/// Rounds to one of the two neighbouring bf16 numbers, more often to the nearer one. `noise`, uniform in [0, 2^16), is
/// added below the last bit that is kept. The mean over all noise is the value itself (except for overflow to
/// infinity). The result is in the upper 16 bits; the lower bits are undefined. REQUIRES: if the number is a NaN, it is
/// quiet, as all results of arithmetic are, and its noise is zero.
template <class Bits, class Float>
TESSERA_ALWAYS_INLINE Bits bf16_stochastic(Float value, Bits noise) {
  return __builtin_bit_cast(Bits, value) + noise;
}

/// fp16 has a sign, 5 exponent bits (bias 15) and 10 mantissa bits. Rounds to nearest, ties to even. Each formula is
/// right in one range:
///  - normal results: the exponent is rebiased by 127 - 15 = 112 while 13 mantissa bits are rounded away; a result
///    beyond the largest finite number is clamped to infinity;
///  - results below 2^-14: adding 0.5 makes the adder round to the subnormals' spacing of 2^-24, since numbers in
///    [0.5, 1) lie 2^-24 apart;
///  - NaN.
template <class Bits, class Float>
TESSERA_ALWAYS_INLINE Bits fp16_nearest(Float value) {
  const Bits bits = __builtin_bit_cast(Bits, value);
  constexpr std::uint32_t kHalf = 0x3f000000u;  // the bits of 0.5f
  const Bits sign = (bits >> 16) & 0x8000u;
  const Bits magnitude = bits & 0x7fffffffu;

  const Bits rounded = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const Bits rebiased = rounded - (112u << 10);
  const Bits infinity = Bits{} + 0x7c00u;
  const Bits normal = rebiased > 0x7c00u ? infinity : rebiased;
  const Bits subnormal = __builtin_bit_cast(Bits, __builtin_bit_cast(Float, magnitude) + 0.5f) - kHalf;
  const Bits quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);

  Bits result = magnitude < 0x38800000u ? subnormal : normal;
  result = value != value ? quiet_nan : result;
  return sign | result;
}

// A split master is an fp32 number in two halves. The high half is a bf16 number, with which the model can compute. The
// low half is the signed rest:
//
//   high = (bits + 0x8000) >> 16        the nearest bf16 number, ties away from zero
//   low  = bits - (high << 16)          in [-0x8000, 0x7fff]
//   bits = (high << 16) + low
//
// The two halves give back every pattern that is not a NaN, bit for bit, also where `high` is rounded up to infinity.
// Rounding ties to even would not work: 2^16 + 1 masters would share one even `high`. Every NaN becomes the quiet NaN
// 0x7fc00000, so that `high` is a NaN too.

/// Returns the bit pattern for split_high and split_low: the pattern of the number, or the quiet NaN 0x7fc00000.
template <class Bits, class Float>
TESSERA_ALWAYS_INLINE Bits splittable(Float value) {
  const Bits bits = __builtin_bit_cast(Bits, value);
  const Bits quiet_nan = Bits{} + 0x7fc00000u;
  return value != value ? quiet_nan : bits;
}
/// Returns the high half, in the low 16 bits.
template <class Bits>
TESSERA_ALWAYS_INLINE Bits split_high(Bits splittable_bits) {
  return (splittable_bits + 0x8000u) >> 16;
}
/// Returns the low half, in the low 16 bits. The bits above them are not defined.
template <class Bits>
TESSERA_ALWAYS_INLINE Bits split_low(Bits splittable_bits) {
  return splittable_bits;  // `high << 16` has zeros in the low bits
}
/// Returns the two halves as one fp32 pattern. `low` is sign-extended to 32 bits.
template <class Bits>
TESSERA_ALWAYS_INLINE Bits join_split(Bits high, Bits low) {
  return (high << 16) + low;
}

}  // namespace tessera
