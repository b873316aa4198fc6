#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"
#include "optim/arithmetic/simd.h"

namespace tessera {
namespace {

/// Codes 0 to `kSteps` - 1 (kSteps: 128 or 256) for numbers from 0 to a block's largest number. The spacing of the
/// codes grows with the number, as in telephony's A-law (ITU-T G.711).
///
/// Halving the bits of a positive fp32 number halves its exponent. So phi(x) = float(bits(x) / 2 + bits(1.0) / 2) is a
/// piecewise linear function within 6 % of sqrt(x). Integer operations compute and invert this function exactly. The
/// function has phi(1) = 1, and its knots are at phi = 2^-k and 1.5 * 2^-k. The code of x, which is relative to the
/// block's scale, is
///
///   code(x) = kSteps * (phi(x + kOffset) - kRootOffset),   kRootOffset = 2 / kSteps, kOffset = kRootOffset^2
///
/// The offset makes the first steps equal, with the width kOffset, so that 0 has a code. Every knot is then at a whole
/// code, so the function is linear between two neighbouring codes, and rounding the code stochastically has no bias in
/// x itself. Softsign and square-root companding of moments also have a spacing like that of square roots (FlashOptim,
/// arXiv 2602.23349). The form used here needs no division, no square root, and no conversion between integers and
/// floats. If kSteps is 128, neighbouring codes differ by 2^-12 of the scale near 0, and by 1.6 to 3.2 % of the number
/// near the largest number. If kSteps is 256, they differ by 2^-14 of the scale near 0, and by 0.8 to 1.6 % of the
/// number near the largest number.
template <class V, std::uint32_t kSteps>
struct Companding {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using Int = typename V::Int;

  static constexpr float kRootOffset = 2.0f / kSteps;
  static constexpr float kOffset = kRootOffset * kRootOffset;
  /// The number whose code is kSteps - 1. This number follows from the function's last linear segment, which has slope
  /// 1/2.
  static constexpr float kLargest = 1.0f + 2.0f * (kRootOffset - 1.0f / kSteps) - kOffset;

  /// If 1.5 * 2^23 is added to a number, the sum's fraction of 23 bits has three parts. The first bit comes from 1.5 *
  /// 2^23, the next log2(kSteps) bits are the code, and the other bits are the code's fraction. Noise with as many bits
  /// as the code's fraction decides whether a number is rounded down or up.
  static constexpr int kNoiseBits = 22 - __builtin_ctz(kSteps);

  /// Rounds a number (>= 0); `code` then takes the number's code from the 16 bits that begin at bit kNoiseBits. `half`:
  /// half the number; `noise`: uniform in [0, 2^kNoiseBits).
  static TESSERA_ALWAYS_INLINE Bits encode(Float half, Bits noise) {
    // Floats from 2^23 on are whole numbers, and their bit patterns, as integers, grow by 1 from each number to the
    // next. The value to which the root is added is 1.5 * 2^23 minus two codes, since the root is two codes too large.
    // One step of the code is 2^kNoiseBits in the bit pattern.
    const Float root = V::float_of(V::bits_of(half + kOffset / 2) >> 1);
    constexpr std::uint32_t kBegin = kCodeZero - (2u << kNoiseBits);
    return V::bits_of(V::add_multiple(V::float_of(noise | kBegin), root, kCodesOfRoot * (1u << kNoiseBits)));
  }
  /// Returns the code. A number above kLargest gets the code of kLargest, and so does a NaN. The 16 bits in `encoded`
  /// have the same order as the floats from which they were taken: bit 30 may be missing, but it is set in all of these
  /// floats, since they are above 2.0.
  template <class Words>
  static TESSERA_ALWAYS_INLINE Words code(Words encoded) {
    constexpr auto kZero = static_cast<std::uint16_t>(kCodeZero >> kNoiseBits);
    return V::min_word(encoded, kZero + kSteps - 1) - kZero;
  }

  /// Returns the decoded number of a code, times `scale`, rounded once. REQUIRES: block_scale returned the scale.
  static TESSERA_ALWAYS_INLINE Float decode(Int code, float scale) {
    // The float with the bit pattern kBegin + code grows by the same amount from each code to the next. The root is
    // (code + 2) / kCodesOfRoot.
    constexpr std::uint32_t kBegin = 0x27800000u - (kSteps == 256 ? 1u << 23 : 0);
    constexpr float kBelow = __builtin_bit_cast(float, kBegin) - 2 / kCodesOfRoot;
    const Float root = V::float_of(Bits(code) | kBegin) - kBelow;
    return V::scaled_difference(V::float_of(V::bits_of(root) << 1), kOffset / 2, 2 * scale);
  }

 private:
  static constexpr std::uint32_t kCodeZero = 0x4b400000u;  // the bits of 1.5 * 2^23
  /// The bits of phi are half of x's bits plus half of the bits of 1.0; the latter add 63.5 to the exponent. `encode`
  /// takes half of the bits of x / 2 and adds nothing, which lowers the exponent by 0.5 more. The exponent is therefore
  /// too low by 64. The missing factor of 2^64 is part of a multiplication that is needed anyway.
  static constexpr float kCodesOfRoot = 0x1p64f * kSteps;
};

}  // namespace
}  // namespace tessera
