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

  static constexpr float kRootOffset = 2.0f / kSteps;
  static constexpr float kOffset = kRootOffset * kRootOffset;
  static constexpr float kLargestCode = kSteps - 1;
  /// The number whose code is kLargestCode, by the function's last piece, which has slope 1/2.
  static constexpr float kLargest = 1.0f + 2.0f * (kLargestCode / kSteps + kRootOffset - 1.0f) - kOffset;
  static constexpr std::uint32_t kHalfOne = 0x3f800000u / 2;  // half the bits of 1.0f

  /// The code before rounding, at most kLargestCode; that too for NaN.
  static TESSERA_ALWAYS_INLINE Float code(Float x) {
    const Float root = V::float_of((V::bits_of(x + kOffset) >> 1) + kHalfOne);
    const Float exact = (root - kRootOffset) * static_cast<float>(kSteps);
    const Float most = exact * 0.0f + kLargestCode;
    return exact < kLargestCode ? exact : most;
  }

  /// The number that a code stands for, relative to the scale. Exact.
  static TESSERA_ALWAYS_INLINE Float value(Float code) {
    const Float root = code * (1.0f / kSteps) + kRootOffset;
    return V::float_of((V::bits_of(root) - kHalfOne) << 1) - kOffset;
  }

  /// `code` rounded down or up by chance: `noise` is uniform in [0, 2^16).
  static TESSERA_ALWAYS_INLINE typename V::Int round(Float code, Bits noise) {
    const Float share = V::template convert<Float>(reinterpret_cast<typename V::Int>(noise)) * 0x1p-16f;
    return V::template convert<typename V::Int>(code + share);
  }
};

}  // namespace
}  // namespace tessera
