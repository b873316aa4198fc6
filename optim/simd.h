#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
// Everything here, and in the headers built on it (step_kernel.h and those it includes), has internal linkage and names
// no function of the standard library: each of step_loops_*.cc compiles it for another processor, and the linker must
// never take one file's copy of a function for another's.
namespace {

/// `kLanes` fp32 numbers, or as many integers, in one register: 4 for SSE2 and other architectures, 8 for AVX2, 16 for
/// AVX-512. The types are the compiler's vectors, so + - * / & | ^ << >>, comparisons and ?: work lane by lane and
/// mean what they mean for one number; what has no operator is below.
template <int kLanes>
struct Simd {
  static constexpr std::size_t kWidth = kLanes;

  template <class T>
  struct Vector {
    typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
  };
  template <class T>
  using Of = typename Vector<T>::Type;
  using Float = Of<float>;
  using Bits = Of<std::uint32_t>;
  using Int = Of<std::int32_t>;

  /// The first `count` lanes from memory of any alignment, the rest zero. With a constant `count` of kWidth, as in every
  /// loop's body, it is one instruction; only a loop's last call has fewer.
  template <class T>
  static TESSERA_ALWAYS_INLINE Of<T> load(const T* from, std::size_t count) {
    Of<T> lanes = {};
    __builtin_memcpy(&lanes, from, count * sizeof(T));
    return lanes;
  }
  template <class T>
  static TESSERA_ALWAYS_INLINE void store(T* to, std::size_t count, Of<T> lanes) {
    __builtin_memcpy(to, &lanes, count * sizeof(T));
  }

  /// Lane by lane to another type: integers are extended or cut off, floats lose their fraction.
  template <class To, class From>
  static TESSERA_ALWAYS_INLINE To convert(From lanes) {
    return __builtin_convertvector(lanes, To);
  }

  static TESSERA_ALWAYS_INLINE Bits bits_of(Float lanes) { return reinterpret_cast<Bits>(lanes); }
  static TESSERA_ALWAYS_INLINE Float float_of(Bits lanes) { return reinterpret_cast<Float>(lanes); }

  /// Exactly rounded, as IEEE 754 wants it of a square root.
  static TESSERA_ALWAYS_INLINE Float sqrt(Float lanes) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Float(_mm512_maskz_sqrt_ps(0xffff, __m512(lanes)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Float(_mm256_sqrt_ps(__m256(lanes)));
#endif
#if defined(__x86_64__)
    if constexpr (kLanes == 4) return Float(_mm_sqrt_ps(__m128(lanes)));
#endif
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = __builtin_sqrtf(lanes[lane]);
    return lanes;
  }

  /// 0, 1, ..., kLanes - 1.
  static TESSERA_ALWAYS_INLINE Bits lane_numbers() {
    Bits numbers;
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = static_cast<std::uint32_t>(lane);
    return numbers;
  }

  static TESSERA_ALWAYS_INLINE std::uint32_t largest(Bits lanes) {
    std::uint32_t most = 0;
    for (int lane = 0; lane < kLanes; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
  }
};

}  // namespace
}  // namespace tessera
