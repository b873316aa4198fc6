#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
// Everything here, and in the headers built on it (step_kernel.h and those it includes), has internal linkage and calls
// no function of the standard library: each of step_loops_*.cc compiles it for another processor, and the linker must
// never take one file's copy of a function for another's.
namespace {

/// `kLanes` fp32 numbers, or as many integers, in one register: 4 for SSE2 and other architectures, 8 for AVX2, 16 for
/// AVX-512. The types are the compiler's vectors, so + - * / & | ^ << >>, comparisons and ?: work lane by lane and
/// mean what they mean for one number; what has no operator is below.
template <int kLanes>
struct Simd {
  static constexpr std::size_t kWidth = kLanes;
  static constexpr std::uint16_t kAll = 0xffff;  // the lanes of AVX-512 instructions that are to be computed

  template <class T>
  struct Vector {
    typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
  };
  template <class T>
  using Of = typename Vector<T>::Type;
  using Float = Of<float>;
  using Bits = Of<std::uint32_t>;
  using Int = Of<std::int32_t>;

  /// The first `count` lanes from memory of any alignment, the rest zero. With a constant `count` of kWidth, as in
  /// every loop's body, it is one instruction; only a loop's last call has fewer.
  template <class T>
  static TESSERA_ALWAYS_INLINE Of<T> load(const T* from, std::size_t count) {
    Of<T> lanes = {};
    __builtin_memcpy(&lanes, from, count * sizeof(T));
    return lanes;
  }
  /// The same from a long run of memory that is read once, in order: asks the cache for what comes kAheadBytes later.
  /// A loop with divisions fills the processor's window before it sees the next lines; those of 2 and 1 bytes an
  /// element lose a third of their speed without this.
  template <class T>
  static TESSERA_ALWAYS_INLINE Of<T> stream(const T* from, std::size_t count) {
    constexpr std::size_t kAheadBytes = 1024;
    __builtin_prefetch(reinterpret_cast<const char*>(from) + kAheadBytes);
    return load(from, count);
  }
  template <class T>
  static TESSERA_ALWAYS_INLINE void store(T* to, std::size_t count, Of<T> lanes) {
    __builtin_memcpy(to, &lanes, count * sizeof(T));
  }

  /// Integers of 8 or 16 bits to 32, with their sign if they have one; back, dropping high bits; integers to floats;
  /// and back, dropping fractions. (The compiler's own conversions are right too, but take three instructions for one.)
  static TESSERA_ALWAYS_INLINE Bits widen(Of<std::uint16_t> x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Bits(_mm512_maskz_cvtepu16_epi32(kAll, __m256i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Bits(_mm256_cvtepu16_epi32(__m128i(x)));
#endif
    return __builtin_convertvector(x, Bits);
  }
  static TESSERA_ALWAYS_INLINE Int widen(Of<std::int16_t> x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Int(_mm512_maskz_cvtepi16_epi32(kAll, __m256i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Int(_mm256_cvtepi16_epi32(__m128i(x)));
#endif
    return __builtin_convertvector(x, Int);
  }
  static TESSERA_ALWAYS_INLINE Int widen(Of<std::uint8_t> x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Int(_mm512_maskz_cvtepu8_epi32(kAll, __m128i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Int(_mm256_cvtepu8_epi32(eight_bytes(x)));
#endif
    return __builtin_convertvector(x, Int);
  }
  static TESSERA_ALWAYS_INLINE Int widen(Of<std::int8_t> x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Int(_mm512_maskz_cvtepi8_epi32(kAll, __m128i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Int(_mm256_cvtepi8_epi32(eight_bytes(x)));
#endif
    return __builtin_convertvector(x, Int);
  }
  template <class T>
  static TESSERA_ALWAYS_INLINE Of<T> narrow(Bits x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16 && sizeof(T) == 2) return Of<T>(_mm512_maskz_cvtepi32_epi16(kAll, __m512i(x)));
    if constexpr (kLanes == 16 && sizeof(T) == 1) return Of<T>(_mm512_maskz_cvtepi32_epi8(kAll, __m512i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8 && sizeof(T) == 1) {
      // The lowest byte of each number, to the front of each half; then the halves' fronts side by side.
      const __m256i lowest = _mm256_set1_epi32(0x0c080400);
      const __m256i fronts = _mm256_shuffle_epi8(__m256i(x), lowest);
      const __m256i together = _mm256_permutevar8x32_epi32(fronts, _mm256_set_epi32(0, 0, 0, 0, 0, 0, 4, 0));
      return __builtin_bit_cast(Of<T>, _mm_cvtsi128_si64(_mm256_castsi256_si128(together)));
    }
#endif
    return __builtin_convertvector(x, Of<T>);
  }
  static TESSERA_ALWAYS_INLINE Float to_float(Int x) { return __builtin_convertvector(x, Float); }
  static TESSERA_ALWAYS_INLINE Int to_int(Float x) { return __builtin_convertvector(x, Int); }

  static TESSERA_ALWAYS_INLINE Bits bits_of(Float lanes) { return Bits(lanes); }
  static TESSERA_ALWAYS_INLINE Float float_of(Bits lanes) { return Float(lanes); }

  /// Exactly rounded, as IEEE 754 wants it of a square root.
  static TESSERA_ALWAYS_INLINE Float sqrt(Float lanes) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Float(_mm512_maskz_sqrt_ps(kAll, __m512(lanes)));
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

  /// a < b ? a : b lane by lane; so b where one is NaN. As the instruction, which the compiler does not find itself.
  static TESSERA_ALWAYS_INLINE Float min(Float a, Float b) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Float(_mm512_maskz_min_ps(kAll, __m512(a), __m512(b)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Float(_mm256_min_ps(__m256(a), __m256(b)));
#endif
    return a < b ? a : b;
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

#if defined(__AVX2__)

 private:
  /// The compiler takes bytes of eight lanes one by one where it is not told.
  template <class Bytes>
  static TESSERA_ALWAYS_INLINE __m128i eight_bytes(Bytes x) {
    return _mm_cvtsi64_si128(__builtin_bit_cast(long long, x));
  }
#endif
};

}  // namespace
}  // namespace tessera
