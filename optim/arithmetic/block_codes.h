#pragma once

#include "optim/arithmetic/companding.h"

namespace tessera {
namespace {

// These classes code each value of a block in 8 bits, relative to a scale that depends on the block's largest value. V
// is Simd, or ScalarLane. A value is encoded in two steps:
//   magnitude(value, half_inverse, noise)   Code::encode's result, without the value's sign or the code's minimum
//   code(magnitudes, tops)                  the code, from V::words<Code::kNoiseBits> of magnitudes and V::tops of
//                                           values; words need half the registers

/// A block's scale, and half of the scale's inverse.
struct BlockScale {
  float scale, half_inverse;
};

/// `most`: the largest magnitude in the block. The formulas with a scale require that Code::kOffset times the scale,
/// and half of the scale's inverse, are normal numbers, and that twice the scale is finite. So a scale below 2^-112
/// counts as 0, and so do the block's values. A block that has an infinity, a NaN, or a number of at least 2^125 has a
/// NaN as its scale, and decodes to NaNs.
template <class Code>
TESSERA_ALWAYS_INLINE BlockScale block_scale(float most) {
  constexpr float kNaN = __builtin_bit_cast(float, 0x7fc00000u);
  if (!(most < 0x1p125f)) return {kNaN, kNaN};
  const float scale = most * (1.0f / Code::kLargest);
  const bool vanishes = scale < 0x1p-112f;
  return {vanishes ? 0.0f : scale, vanishes ? 0.0f : 0.5f / scale};
}

/// The code of a first moment: int8, the sign and a companded magnitude.
template <class V>
struct SignedBlockCode {
  using Byte = std::int8_t;
  static constexpr bool kIsOfRoot = false;
  using Code = Companding<V, 128>;
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using Int = typename V::Int;
  using Words = typename V::Words;

  static TESSERA_ALWAYS_INLINE Float decode(Int code, float scale) {
    const Float magnitude = Code::decode(V::abs(code), scale);
    return V::float_of(V::bits_of(magnitude) | (Bits(code) & 0x80000000u));
  }
  static TESSERA_ALWAYS_INLINE Bits magnitude(Float value, float half_inverse, Bits noise) {
    return Code::encode(V::float_of(V::bits_of(value) & 0x7fffffffu) * half_inverse, noise);
  }
  static TESSERA_ALWAYS_INLINE Words code(Words magnitudes, Words tops) {
    return V::with_sign(Code::code(magnitudes), tops);
  }
};

/// The code of a second moment: uint8, the companded square root of the moment. A moment above zero never gets the code
/// 0: if the moment became 0, the division by its root would make the step far too large. If a moment is stored as a
/// larger number, the step only becomes smaller.
template <class V>
struct RootBlockCode {
  using Byte = std::uint8_t;
  static constexpr bool kIsOfRoot = true;
  using Code = Companding<V, 256>;
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using Words = typename V::Words;

  static TESSERA_ALWAYS_INLINE Float decode(typename V::Int code, float scale) {
    const Float root = Code::decode(code, scale);
    return root * root;
  }
  /// `root`: the square root of the moment; it is never -0.
  static TESSERA_ALWAYS_INLINE Bits magnitude(Float root, float half_inverse, Bits noise) {
    return Code::encode(root * half_inverse, noise);
  }
  /// A root above zero gets a code of at least 1. `tops` is not 0 for such a root: the root of the smallest number is
  /// 2^-74.5, so at least one of the upper 16 bits is set.
  static TESSERA_ALWAYS_INLINE Words code(Words magnitudes, Words tops) {
    return V::max_word(Code::code(magnitudes), V::min_word(tops, 1));
  }
};

}  // namespace
}  // namespace tessera
