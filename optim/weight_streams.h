#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/rounding.h"
#include "optim/simd.h"
#include "optim/step_arguments.h"

namespace tessera {
namespace {

// Where a loop's weights come from and go to, one type for each WeightFormat:
//   load(i, count)             the fp32 masters of elements i to i + count
//   store(i, count, masters)   writes them back, in every form that is kept of them

template <class V>
struct F32Weights {
  float* master;

  explicit TESSERA_ALWAYS_INLINE F32Weights(const StepArguments& a) : master(a.master) {}
  TESSERA_ALWAYS_INLINE typename V::Float load(std::size_t i, std::size_t count) const {
    return V::stream(master + i, count);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, typename V::Float masters) const {
    V::store(master + i, count, masters);
  }
};

template <class V>
struct F32CopiedWeights : F32Weights<V> {
  float* copy;

  explicit TESSERA_ALWAYS_INLINE F32CopiedWeights(const StepArguments& a)
      : F32Weights<V>(a), copy(static_cast<float*>(a.parameter)) {}
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, typename V::Float masters) const {
    F32Weights<V>::store(i, count, masters);
    V::store(copy + i, count, masters);
  }
};

/// `kIsF16`: rounded to fp16, else to bf16.
template <class V, bool kIsF16>
struct HalfCopiedWeights : F32Weights<V> {
  std::uint16_t* copy;

  explicit TESSERA_ALWAYS_INLINE HalfCopiedWeights(const StepArguments& a)
      : F32Weights<V>(a), copy(static_cast<std::uint16_t*>(a.parameter)) {}
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, typename V::Float masters) const {
    F32Weights<V>::store(i, count, masters);
    const auto rounded = kIsF16 ? fp16_nearest<typename V::Bits>(masters) : bf16_nearest<typename V::Bits>(masters);
    V::store(copy + i, count, V::template narrow<std::uint16_t>(rounded));
  }
};

template <class V>
struct SplitWeights {
  std::uint16_t* high;
  std::int16_t* low;

  explicit TESSERA_ALWAYS_INLINE SplitWeights(const StepArguments& a)
      : high(static_cast<std::uint16_t*>(a.parameter)), low(a.low) {}
  TESSERA_ALWAYS_INLINE typename V::Float load(std::size_t i, std::size_t count) const {
    const auto low_bits = typename V::Bits(V::widen(V::stream(low + i, count)));
    return V::float_of(join_split(V::widen(V::stream(high + i, count)), low_bits));
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, typename V::Float masters) const {
    const auto bits = splittable<typename V::Bits>(masters);
    V::store(high + i, count, V::template narrow<std::uint16_t>(split_high(bits)));
    V::store(low + i, count, V::template narrow<std::int16_t>(split_low(bits)));
  }
};

}  // namespace
}  // namespace tessera
