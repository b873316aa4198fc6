#pragma once

#include <cstdint>

#include "optim/instruction_set.h"
#include "optim/simd.h"

namespace tessera {
namespace {

/// Codes 0 to `kSteps` - 1 for numbers from 0 to a block's largest, whose spacing grows with the number, as in
/// telephony's A-law (ITU-T G.711). `kSteps` is a power of two.
///
/// Halving the bits of a positive fp32 number halves its exponent: phi(x) = float(bits(x) / 2 + bits(1.0) / 2) is a
/// piecewise linear function within 6 % of sqrt(x) that integers compute and invert exactly; phi(1) = 1, and its knots
/// are where phi = 2^-k or 1.5 * 2^-k. With x relative to the block's scale,
///
///   code(x) = kSteps * (phi(x + kOffset) - kRootOffset),   kRootOffset = 2 / kSteps, kOffset = kRootOffset^2
///
/// The offset makes the first steps equal, kOffset wide, so that 0 has a code. Every knot is then a whole code, so
/// between two neighbouring codes the function is linear: rounding the code stochastically is unbiased in x itself.
/// Square-root-like spacing is what softsign and square-root companding of moments aim at (FlashOptim, arXiv
/// 2602.23349); this form needs neither a division nor a square root. kSteps = 128: neighbours differ by 2^-12 of the
/// scale near 0, and by 1.6 to 3.2 % of the number itself near the largest; 256: 2^-14, and 0.8 to 1.6 %.
template <class V, std::uint32_t kSteps>
struct Companding {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  using Int = typename V::Int;

  static constexpr float kRootOffset = 2.0f / kSteps;
  static constexpr float kOffset = kRootOffset * kRootOffset;
  /// The number whose code is kSteps - 1, by the function's last piece, which has slope 1/2.
  static constexpr float kLargest = 1.0f + 2.0f * (kRootOffset - 1.0f / kSteps) - kOffset;

  /// The code that a number (>= 0) rounds to, in the upper 16 bits; those below mean nothing. `noise`, uniform in [0, 2^16),
  /// decides whether down or up. What is above kLargest gets its code, and so does NaN.
  static TESSERA_ALWAYS_INLINE Bits encode(Float x, Bits noise) {
    // phi, the product with kSteps and 16 binary places, all at once: the latter two are powers of two.
    const Float root = V::float_of((V::bits_of(x + kOffset) >> 1) + kHalfOne + power_of_two(kSteps << 16));
    const Float code = V::min(root - float{2 << 16}, Float{} + float{(kSteps - 1) << 16});
    return Bits(V::to_int(code)) + noise;
  }

  /// The number that a code stands for. Exact.
  static TESSERA_ALWAYS_INLINE Float decode(Int code) {
    const Bits root = V::bits_of(V::to_float(code + 2)) - (kHalfOne + power_of_two(kSteps));
    return V::float_of(root << 1) - kOffset;
  }

 private:
  static constexpr std::uint32_t kHalfOne = 0x3f800000u / 2;  // half the bits of 1.0f
  /// What is added to a float's bits to multiply it by `power`.
  static constexpr TESSERA_ALWAYS_INLINE std::uint32_t power_of_two(std::uint32_t power) {
    return static_cast<std::uint32_t>(__builtin_ctz(power)) << 23;
  }
};

}  // namespace
}  // namespace tessera
