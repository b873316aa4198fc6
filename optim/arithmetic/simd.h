#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
// All code in this file has internal linkage and calls no function of the standard library. The same holds for
// step_kernel.h and the headers that it includes. Each of step_loops_*.cc compiles this code for another processor, and
// the linker must never use one file's copy of a function for another file.
namespace {

/// `kLanes` fp32 numbers, or as many integers, in one register: 4 for SSE2 and other architectures, 8 for AVX2, 16 for
/// AVX-512. The types are vector types of the compiler. So the arithmetic, bitwise, shift and comparison operators, and
/// ?:, work lane by lane as they do for one number. Operations without an operator are below.
///
/// A loop processes kWidth elements at a time: a group of kVectors registers. AVX2 uses two registers. Together they
/// hold a cache line of fp32 numbers. AVX2 unpacks one register of 16-bit numbers into two such registers.
template <int kLanes>
struct Simd {
  static constexpr int kVectors = kLanes == 8 ? 2 : 1;
  static constexpr std::size_t kWidth = kLanes * kVectors;
  static constexpr std::uint16_t kAll = 0xffff;  // mask of all lanes, for AVX-512 instructions

  template <class T>
  struct Vector {
    typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
  };
  template <class T>
  using Of = typename Vector<T>::Type;
  using Float = Of<float>;
  using Bits = Of<std::uint32_t>;
  using Int = Of<std::int32_t>;

  /// kWidth elements of 32 bits, register by register.
  template <class T>
  struct Group {
    T registers[kVectors];
    TESSERA_ALWAYS_INLINE T& operator[](int v) { return registers[v]; }
    TESSERA_ALWAYS_INLINE const T& operator[](int v) const { return registers[v]; }
  };
  using FloatGroup = Group<Float>;
  using BitGroup = Group<Bits>;
  /// kWidth elements of 8 or 16 bits.
  template <class T>
  using Narrow = typename Simd<kLanes * kVectors>::template Of<T>;
  using Words = Narrow<std::uint16_t>;

  /// Returns the first `count` elements from memory of any alignment, and zeros for the rest. If `count` is the
  /// constant kWidth, as in every loop's body, `load` is one instruction per register; only a loop's last call has a
  /// smaller `count`.
  static TESSERA_ALWAYS_INLINE FloatGroup load(const float* from, std::size_t count) {
    FloatGroup lanes = {};
    for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&lanes[v], from + v * kLanes, 4 * lanes_of(v, count));
    return lanes;
  }
  template <class T>
  static TESSERA_ALWAYS_INLINE Narrow<T> load(const T* from, std::size_t count) {
    Narrow<T> lanes = {};
    __builtin_memcpy(&lanes, from, count * sizeof(T));
    return lanes;
  }
  /// Does what `load` does, for a long run of memory that is read once, in order. It also prefetches the memory
  /// kAheadBytes ahead. The instructions of a loop with divisions fill the processor's instruction window before the
  /// loop reaches the next cache lines. Without prefetching, loops over formats with 2 bytes or 1 byte for each element
  /// lose a third of their speed. Narrower formats gain from a longer distance, up to 3072 bytes; fp32 becomes slower
  /// with a distance of 3072 (AMD, Zen 5).
  template <class T>
  static TESSERA_ALWAYS_INLINE auto stream(const T* from, std::size_t count) {
    ask_ahead(from);
    return load(from, count);
  }
  static TESSERA_ALWAYS_INLINE void store(float* to, std::size_t count, const FloatGroup& lanes) {
    for (int v = 0; v < kVectors; ++v) __builtin_memcpy(to + v * kLanes, &lanes[v], 4 * lanes_of(v, count));
  }
  template <class T>
  static TESSERA_ALWAYS_INLINE void store(T* to, std::size_t count, Narrow<T> lanes) {
    __builtin_memcpy(to, &lanes, count * sizeof(T));
  }

  /// Widens integers of 8 bits to 32, with their sign if they are signed. The integers are read register by register,
  /// as in `stream`. Widening a full register instead would require moving its upper half down first.
  template <class T>
  static TESSERA_ALWAYS_INLINE Group<Int> stream_integers(const T* from, std::size_t count) {
    ask_ahead(from);
    Group<Int> wide;
    for (int v = 0; v < kVectors; ++v) {
      typedef T Bytes __attribute__((vector_size(kLanes)));
      Bytes bytes = {};
      __builtin_memcpy(&bytes, from + v * kLanes, lanes_of(v, count));
      wide[v] = widen<(T(-1) < T(0))>(bytes);
    }
    return wide;
  }

  /// Joins pairs of 16 bits to 32; `narrow` does the reverse and drops the high bits. (The compiler's conversions are
  /// correct too, but take three instructions instead of one.)
  static TESSERA_ALWAYS_INLINE BitGroup join(Narrow<std::uint16_t> high, Narrow<std::uint16_t> low) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) {
      return {Bits(_mm512_maskz_cvtepu16_epi32(kAll, __m256i(high))) << 16 |
              Bits(_mm512_maskz_cvtepu16_epi32(kAll, __m256i(low)))};
    }
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) {  // unpacking takes a quarter from each half, so the two middle quarters must be
                                  // exchanged
      const __m256i highs = _mm256_permute4x64_epi64(__m256i(high), 0xd8);
      const __m256i lows = _mm256_permute4x64_epi64(__m256i(low), 0xd8);
      return {Bits(_mm256_unpacklo_epi16(lows, highs)), Bits(_mm256_unpackhi_epi16(lows, highs))};
    }
#endif
    if constexpr (kVectors == 1)
      return {__builtin_convertvector(high, Bits) << 16 | __builtin_convertvector(low, Bits)};
  }
  template <class T>
  static TESSERA_ALWAYS_INLINE Narrow<T> narrow(const BitGroup& x) {
    static_assert(sizeof(T) == 2);
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Narrow<T>(_mm512_maskz_cvtepi32_epi16(kAll, __m512i(x[0])));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) {
      return Narrow<T>(in_order(Words(_mm256_blend_epi16(__m256i(x[0]), __m256i(x[1] << 16), 0xaa))));
    }
#endif
    if constexpr (kVectors == 1) return __builtin_convertvector(x[0], Narrow<T>);
  }
  /// Returns the upper 16 bits of each element, in order. It needs fewer instructions than a shift and `narrow`.
  static TESSERA_ALWAYS_INLINE Words tops_in_order(const BitGroup& x) {
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return in_order(tops(x));
#endif
    return tops(x);
  }
  /// Returns 16 bits of each element from bit `kFirst` (<= 16) on, in an order that `bytes` undoes.
  template <int kFirst>
  static TESSERA_ALWAYS_INLINE Words words(const BitGroup& x) {
#if defined(__AVX2__)
    if constexpr (kLanes == 8) {
      return Words(_mm256_blend_epi16(__m256i(x[0] >> kFirst), __m256i(x[1] << (16 - kFirst)), 0xaa));
    }
#endif
    BitGroup shifted;
    for (int v = 0; v < kVectors; ++v) shifted[v] = x[v] >> kFirst;
    return narrow<std::uint16_t>(shifted);
  }
  static TESSERA_ALWAYS_INLINE Words tops(const BitGroup& x) { return words<16>(x); }
  /// Returns the low 8 bits of each element of the result of `words`, in order.
  template <class T>
  static TESSERA_ALWAYS_INLINE Narrow<T> bytes(Words x) {
#if defined(__AVX512BW__)
    if constexpr (kLanes == 16) return Narrow<T>(_mm256_maskz_cvtepi16_epi8(kAll, __m256i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) {
      const __m256i halves = _mm256_shuffle_epi8(__m256i(x), _mm256_set1_epi64x(0x0e0a06020c080400));
      const __m256i bytes = _mm256_permutevar8x32_epi32(halves, _mm256_set_epi32(0, 0, 0, 0, 5, 1, 4, 0));
      return Narrow<T>(_mm256_castsi256_si128(bytes));
    }
#endif
    if constexpr (kVectors == 1) return __builtin_convertvector(x, Narrow<T>);
  }
  /// Negates x where the top bit of `tops` is set. The instruction of AVX2 returns 0 where its second operand is 0; the
  /// `| 1` avoids this.
  static TESSERA_ALWAYS_INLINE Words with_sign(Words x, Words tops) {
#if defined(__AVX2__)
    if constexpr (kWidth == 16) return Words(_mm256_sign_epi16(__m256i(x), __m256i(tops | 1)));
#endif
    const auto sign = Words(Narrow<std::int16_t>(tops) >> 15);  // the sign is 0 or -1
    return (x ^ sign) - sign;
  }
  static TESSERA_ALWAYS_INLINE Words min_word(Words x, std::uint16_t most) {
    const Words bound = Words{} + most;
    return x < bound ? x : bound;
  }
  static TESSERA_ALWAYS_INLINE Words max_word(Words x, Words y) { return x > y ? x : y; }

  static TESSERA_ALWAYS_INLINE Int abs(Int x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Int(_mm512_maskz_abs_epi32(kAll, __m512i(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Int(_mm256_abs_epi32(__m256i(x)));
#endif
    return x > -x ? x : -x;
  }

  // A fused multiply-add gives the same bits as two separate operations if one of the two operations is exact.

  /// Returns x + y * factor. REQUIRES: the product is exact, as with a factor that is a power of two.
  static TESSERA_ALWAYS_INLINE Float add_multiple(Float x, Float y, float factor) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return Float(_mm512_fmadd_ps(__m512(y), __m512(Float{} + factor), __m512(x)));
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return Float(_mm256_fmadd_ps(__m256(y), __m256(Float{} + factor), __m256(x)));
#endif
    return x + y * factor;
  }
  /// Returns (x - y) * factor. REQUIRES: both the difference and y * factor are exact.
  static TESSERA_ALWAYS_INLINE Float scaled_difference(Float x, float y, float factor) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) {
      return Float(_mm512_fmsub_ps(__m512(x), __m512(Float{} + factor), __m512(Float{} + y * factor)));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) {
      return Float(_mm256_fmsub_ps(__m256(x), __m256(Float{} + factor), __m256(Float{} + y * factor)));
    }
#endif
    return (x - y) * factor;
  }

  static TESSERA_ALWAYS_INLINE Bits bits_of(Float lanes) { return Bits(lanes); }
  static TESSERA_ALWAYS_INLINE Float float_of(Bits lanes) { return Float(lanes); }

  /// Returns the square roots, rounded exactly as IEEE 754 requires.
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

  /// Returns `lanes`, with zeros in each lane in which `a` or `b` is a NaN.
  static TESSERA_ALWAYS_INLINE Bits where_ordered(Bits lanes, Float a, Float b) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) {
      return Bits(_mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_ORD_Q), __m512i(lanes)));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) return lanes & Bits(_mm256_cmp_ps(__m256(a), __m256(b), _CMP_ORD_Q));
#endif
    return lanes & Bits(a == a) & Bits(b == b);
  }

  /// Returns 0, 1, ..., kLanes - 1.
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

 private:
  static TESSERA_ALWAYS_INLINE void ask_ahead(const void* from) {
    constexpr std::size_t kAheadBytes = 2560;
    __builtin_prefetch(static_cast<const char*>(from) + kAheadBytes);
  }
  /// Widens kLanes integers of 8 bits.
  template <bool kIsSigned, class Bytes>
  static TESSERA_ALWAYS_INLINE Int widen(Bytes x) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) {
      return Int(kIsSigned ? _mm512_maskz_cvtepi8_epi32(kAll, __m128i(x))
                           : _mm512_maskz_cvtepu8_epi32(kAll, __m128i(x)));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kLanes == 8) {
      const __m128i low = _mm_cvtsi64_si128(__builtin_bit_cast(long long, x));
      return Int(kIsSigned ? _mm256_cvtepi8_epi32(low) : _mm256_cvtepu8_epi32(low));
    }
#endif
    if constexpr (kLanes == 4) return __builtin_convertvector(x, Int);
  }
  /// Returns how many of a group's first `count` elements are in register `v`.
  static TESSERA_ALWAYS_INLINE std::size_t lanes_of(int v, std::size_t count) {
    const std::size_t before = static_cast<std::size_t>(v) * kLanes;
    return count <= before ? 0 : count - before < kLanes ? count - before : kLanes;
  }
#if defined(__AVX2__)
  /// Puts the numbers of two registers, which are interleaved, into the order of one register followed by the other.
  /// The function sorts within each half of the register first, and then exchanges the two quarters in the middle.
  static TESSERA_ALWAYS_INLINE Words in_order(Words pairs) {
    const __m128i order = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    const __m256i halves = _mm256_shuffle_epi8(__m256i(pairs), _mm256_broadcastsi128_si256(order));
    return Words(_mm256_permute4x64_epi64(halves, 0xd8));
  }
#endif
};

}  // namespace
}  // namespace tessera
