#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {
namespace {

/// Holds one number, with the interface of Simd for one lane. A GPU thread computes with this type. Its operations are
/// those of Simd, and give the same bits.
struct ScalarLane {
  static constexpr std::size_t kWidth = 1;
  using Float = float;
  using Bits = std::uint32_t;
  using Int = std::int32_t;
  using Words = std::uint16_t;

  static TESSERA_ALWAYS_INLINE Bits bits_of(Float x) { return __builtin_bit_cast(Bits, x); }
  static TESSERA_ALWAYS_INLINE Float float_of(Bits x) { return __builtin_bit_cast(Float, x); }
  static TESSERA_ALWAYS_INLINE Int abs(Int x) { return x < 0 ? -x : x; }
  template <int kFirst>
  static TESSERA_ALWAYS_INLINE Words words(Bits x) {
    return static_cast<Words>(x >> kFirst);
  }
  static TESSERA_ALWAYS_INLINE Words tops(Bits x) { return words<16>(x); }
  static TESSERA_ALWAYS_INLINE Float add_multiple(Float x, Float y, float factor) { return x + y * factor; }
  static TESSERA_ALWAYS_INLINE Float scaled_difference(Float x, float y, float factor) { return (x - y) * factor; }
  static TESSERA_ALWAYS_INLINE Words with_sign(Words x, Words tops) {
    return static_cast<Words>((tops & 0x8000u) != 0 ? 0u - x : x);
  }
  static TESSERA_ALWAYS_INLINE Words min_word(Words x, std::uint16_t most) { return x < most ? x : most; }
  static TESSERA_ALWAYS_INLINE Words max_word(Words x, Words y) { return x > y ? x : y; }
  /// Returns the square root, rounded exactly as IEEE 754 requires.
  static TESSERA_ALWAYS_INLINE Float sqrt(Float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
  }
};

}  // namespace
}  // namespace tessera
