#pragma once

#include <cstdint>

#include "optim/scalar_lane.h"

namespace tessera::cuda {
namespace {

/// ScalarLane with square roots and divisions that do not branch, so that those of a thread's elements are under way together: the
/// sequences by which the compiler computes them too, exactly rounded, but only for numbers of usual size. For others, zero among them,
/// the result is NaN, and who gets one computes the element again with ScalarLane.
struct FastLane : ScalarLane {
  /// From 2^-101 on, and finite.
  static __device__ __forceinline__ Float sqrt(Float x) {
#if defined(__CUDA_ARCH__)
    float estimate;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    const float root = __fmul_rn(x, estimate);
    const float better = __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(estimate, 0.5f), root);
    return bits_of(x) - 0x0d000000u <= 0x727fffffu ? better : not_a_number();
#else
    return ScalarLane::sqrt(x);
#endif
  }

  /// Both from 2^-60 to below 2^60.
  static __device__ __forceinline__ Float divide(Float a, Float b) {
#if defined(__CUDA_ARCH__)
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(b));
    const float inverse = __fmaf_rn(estimate, __fmaf_rn(-b, estimate, 1.0f), estimate);
    const float quotient = __fmul_rn(a, inverse);
    const float better = __fmaf_rn(inverse, __fmaf_rn(-b, quotient, a), quotient);
    return is_usual(a) && is_usual(b) ? better : not_a_number();
#else
    return ScalarLane::divide(a, b);
#endif
  }

 private:
  static __device__ __forceinline__ float not_a_number() { return float_of(0x7fffffffu); }
  static __device__ __forceinline__ bool is_usual(Float x) {
    constexpr std::uint32_t kExponent = 1u << 23;
    return (bits_of(x) & 0x7fffffffu) - (127 - 60) * kExponent < 120 * kExponent;
  }
};

}  // namespace
}  // namespace tessera::cuda
