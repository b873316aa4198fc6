#pragma once

#include "optim/companding.h"

namespace tessera {
namespace {

// A block's values in 8 bits each, relative to a scale that its largest value sets. V: Simd, or ScalarLane. A value is encoded
// in two steps:
//   magnitude(value, inverse, noise)   the code without its sign or its minimum, in the upper 16 bits; those below mean nothing
//   code(magnitudes, tops)             the code, of the upper 16 bits of magnitudes and of values (V::tops): with half the
//                                      registers

/// A block's scale, and what values are multiplied by to become relative to it.
struct BlockScale {
  float scale, inverse;
};

/// `most`: the block's largest magnitude. A scale whose inverse would overflow counts as 0, and so do the block's
/// values. A block that holds an infinity or a NaN gets a scale that is one, and decodes to no finite number.
template <class Code>
TESSERA_ALWAYS_INLINE BlockScale block_scale(float most) {
  constexpr float kSmallestNormal = 0x1p-126f;
  const float scale = most * (1.0f / Code::kLargest);
  const bool vanishes = scale < kSmallestNormal;
  return {vanishes ? 0.0f : scale, vanishes ? 0.0f : 1.0f / scale};
}

/// A first moment: int8, the sign and a companded magnitude.
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
    const Int minus = -code;
    const Float magnitude = Code::decode(code > minus ? code : minus) * scale;
    return V::float_of(V::bits_of(magnitude) | (Bits(code) & 0x80000000u));
  }
  static TESSERA_ALWAYS_INLINE Bits magnitude(Float value, float inverse, Bits noise) {
    return Code::encode(V::float_of(V::bits_of(value) & 0x7fffffffu) * inverse, noise);
  }
  static TESSERA_ALWAYS_INLINE Words code(Words magnitudes, Words tops) { return V::with_sign(magnitudes, tops); }
};

/// A second moment: uint8, its companded square root. Above zero it never gets the code 0: dividing by the root of a
/// moment that vanished would blow a step up, while one that is kept too large only makes a step smaller.
template <class V>
struct RootBlockCode {
  using Byte = std::uint8_t;
  static constexpr bool kIsOfRoot = true;
  using Code = Companding<V, 256>;
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using Words = typename V::Words;

  static TESSERA_ALWAYS_INLINE Float decode(typename V::Int code, float scale) {
    const Float root = Code::decode(code) * scale;
    return root * root;
  }
  /// `root`: the square root of the moment; it is never -0.
  static TESSERA_ALWAYS_INLINE Bits magnitude(Float root, float inverse, Bits noise) {
    return Code::encode(root * inverse, noise);
  }
  /// A root above zero has bits among its upper 16, since the root of the smallest number is 2^-74.5.
  static TESSERA_ALWAYS_INLINE Words code(Words magnitudes, Words tops) {
    return V::max_word(magnitudes, V::min_word(tops, 1));
  }
};

}  // namespace
}  // namespace tessera
