#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/rounding.h"
#include "optim/arithmetic/simd.h"
#include "optim/arithmetic/step_arguments.h"

namespace tessera {
namespace {

// These types read and write a loop's weights, one type for each WeightFormat:
//   kIsNarrow                  whether weights are rounded or cut when they are stored
//   load(i, count)             the fp32 masters of the elements [i, i + count)
//   store(i, count, masters)   writes the masters back, in every format in which they are kept

/// fp32 masters, which are the parameters.
template <class V>
struct F32Weights {
  static constexpr bool kIsNarrow = false;
  float* master;

  explicit TESSERA_ALWAYS_INLINE F32Weights(const StepArguments& a) : master(a.master) {}
  TESSERA_ALWAYS_INLINE typename V::FloatGroup load(std::size_t i, std::size_t count) const {
    return V::stream(master + i, count);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const typename V::FloatGroup& masters) const {
    V::store(master + i, count, masters);
  }
};

/// fp32 masters, with a copy in fp32.
template <class V>
struct F32CopiedWeights : F32Weights<V> {
  float* copy;

  explicit TESSERA_ALWAYS_INLINE F32CopiedWeights(const StepArguments& a)
      : F32Weights<V>(a), copy(static_cast<float*>(a.parameter)) {}
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const typename V::FloatGroup& masters) const {
    F32Weights<V>::store(i, count, masters);
    V::store(copy + i, count, masters);
  }
};

/// fp32 masters, with a narrow copy. `kIsF16`: the copy is rounded to fp16, else to bf16.
template <class V, bool kIsF16>
struct HalfCopiedWeights : F32Weights<V> {
  static constexpr bool kIsNarrow = true;
  std::uint16_t* copy;

  explicit TESSERA_ALWAYS_INLINE HalfCopiedWeights(const StepArguments& a)
      : F32Weights<V>(a), copy(static_cast<std::uint16_t*>(a.parameter)) {}
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const typename V::FloatGroup& masters) const {
    F32Weights<V>::store(i, count, masters);
    typename V::BitGroup rounded;
    for (int v = 0; v < V::kVectors; ++v) {
      rounded[v] = kIsF16 ? fp16_nearest<typename V::Bits>(masters[v]) : bf16_nearest<typename V::Bits>(masters[v]);
    }
    V::store(copy + i, count, V::template narrow<std::uint16_t>(rounded));
  }
};

/// bf16 parameters, with the low halves of their masters.
template <class V>
struct SplitWeights {
  static constexpr bool kIsNarrow = true;
  std::uint16_t* high;
  std::int16_t* low;

  explicit TESSERA_ALWAYS_INLINE SplitWeights(const StepArguments& a)
      : high(static_cast<std::uint16_t*>(a.parameter)), low(a.low) {}
  TESSERA_ALWAYS_INLINE typename V::FloatGroup load(std::size_t i, std::size_t count) const {
    using Words = typename V::template Narrow<std::uint16_t>;
    const auto lows = V::stream(low + i, count);
    const Words carries = Words(lows >> 15);  // -1 if `low` is negative: see join_split
    const typename V::BitGroup bits = V::join(V::stream(high + i, count) + carries, Words(lows));
    typename V::FloatGroup masters;
    for (int v = 0; v < V::kVectors; ++v) masters[v] = V::float_of(bits[v]);
    return masters;
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const typename V::FloatGroup& masters) const {
    typename V::BitGroup highs, lows;
    for (int v = 0; v < V::kVectors; ++v) {
      const auto bits = splittable<typename V::Bits>(masters[v]);
      highs[v] = split_high(bits);
      lows[v] = split_low(bits);
    }
    V::store(high + i, count, V::template narrow<std::uint16_t>(highs));
    V::store(low + i, count, V::template narrow<std::int16_t>(lows));
  }
};

}  // namespace
}  // namespace tessera
