#pragma once

#include "optim/adam_element.h"
#include "optim/sgd_element.h"
#include "optim/state_streams.h"
#include "optim/step_loops.h"
#include "optim/weight_streams.h"

namespace tessera {
namespace {

// The loops, for any vector type V, any kind of weights and any kind of state. Elements are independent of each other
// (but for the scale of an 8-bit block), and each operation is rounded on its own.

#define TESSERA_INLINE_BODY __attribute__((always_inline))

/// Calls `body(i, count)` for the elements [begin, end), a vector at a time; the last call may have fewer.
template <class V, class Body>
TESSERA_ALWAYS_INLINE void for_vectors(std::size_t begin, std::size_t end, const Body& body) {
  std::size_t i = begin;
  for (; i + V::kWidth <= end; i += V::kWidth) body(i, V::kWidth);
  if (i < end) body(i, end - i);
}

/// The same by blocks of a state: `body(begin, end)`.
template <class Body>
TESSERA_ALWAYS_INLINE void for_blocks(std::size_t numel, const Body& body) {
  constexpr std::size_t kBlock = kStateBlock;
  for (std::size_t begin = 0; begin < numel; begin += kBlock) {
    body(begin, numel - begin < kBlock ? numel : begin + kBlock);
  }
}

template <class V>
TESSERA_ALWAYS_INLINE typename V::Bits noise_of(const StepArguments& a, std::size_t i) {
  const std::uint32_t first = (a.first_element + static_cast<std::uint32_t>(i)) * kNoiseStride;
  return noise_at(a.noise, V::lane_numbers() * kNoiseStride + first);
}

/// The formulas are in adam_element.h. The first moment's noise is an element's low 16 random bits, the second's the high.
template <class V, class Weights, class First, class Second>
void adam_loop(const AdamConstants& constants, const StepArguments& arguments) {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  const AdamConstants c = constants;
  const StepArguments a = arguments;
  alignas(64) float first_values[kStateBlock], second_values[kStateBlock];
  const Weights weights(a);
  First first(a.state0, first_values);
  Second second(a.state1, second_values);

  for_blocks(a.numel, [&](std::size_t begin, std::size_t end) TESSERA_INLINE_BODY {
    first.open(begin);
    second.open(begin);
    for_vectors<V>(begin, end, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
      const Float weight = weights.load(i, count);
      const Float gradient = V::stream(a.gradient + i, count);
      const AdamElement<V> next = adam_element<V>(c, gradient, weight, first.load(i, count), second.load(i, count));
      weights.store(i, count, next.weight);
      const Bits noise = First::kNoisyStore ? noise_of<V>(a, i) : Bits{};
      first.store(i, count, next.first, noise & 0xffffu);
      if constexpr (Second::kEncodesBlocks) {
        second.store_root(i, next.root);
      } else {
        second.store(i, count, next.second, noise >> 16);
      }
    });
    if constexpr (First::kEncodesBlocks) {
      first.close(begin);
      second.close(begin);
      for_vectors<V>(begin, end, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
        const Bits noise = noise_of<V>(a, i);
        first.encode(i, count, noise & 0xffffu);
        second.encode(i, count, noise >> 16);
      });
    }
  });
}

/// The formulas are in sgd_element.h. Without momentum, `buffer` is never touched.
template <class V, class Weights, class Buffer>
void sgd_loop(const SgdConstants& constants, const StepArguments& arguments) {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  const SgdConstants c = constants;
  const StepArguments a = arguments;
  const Weights weights(a);
  const Buffer buffer(a.state0, nullptr);
  for_vectors<V>(0, a.numel, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
    const Float weight = weights.load(i, count);
    const Float gradient = V::stream(a.gradient + i, count);
    const Float old = c.has_momentum && !c.first_step ? buffer.load(i, count) : Float{};
    const SgdElement<V> next = sgd_element<V>(c, gradient, weight, old);
    if (c.has_momentum) {
      buffer.store(i, count, next.buffer, Buffer::kNoisyStore ? noise_of<V>(a, i) & 0xffffu : Bits{});
    }
    weights.store(i, count, next.weight);
  });
}

// The formats are chosen outside the loops, so that the loops have no branch on them.

template <class V, class Weights>
void adam_on(const AdamConstants& c, const StepArguments& a) {
  switch (a.states) {
    case StateDType::kF32:
      return adam_loop<V, Weights, F32State<V>, F32State<V>>(c, a);
    case StateDType::kBF16:
      return adam_loop<V, Weights, BF16State<V>, BF16State<V>>(c, a);
    case StateDType::k8Bit:
      return adam_loop<V, Weights, SignedBlockState<V>, RootBlockState<V>>(c, a);
  }
}

template <class V>
void adam(const AdamConstants& c, const StepArguments& a) {
  switch (a.weights) {
    case WeightFormat::kF32:
      return adam_on<V, F32Weights<V>>(c, a);
    case WeightFormat::kF32AndF32:
      return adam_on<V, F32CopiedWeights<V>>(c, a);
    case WeightFormat::kF32AndBF16:
      return adam_on<V, HalfCopiedWeights<V, false>>(c, a);
    case WeightFormat::kF32AndF16:
      return adam_on<V, HalfCopiedWeights<V, true>>(c, a);
    case WeightFormat::kSplitBF16:
      return adam_on<V, SplitWeights<V>>(c, a);
  }
}

/// 8-bit momentum does not exist: Sgd refuses it.
template <class V, class Weights>
void sgd_on(const SgdConstants& c, const StepArguments& a) {
  a.states == StateDType::kBF16 ? sgd_loop<V, Weights, BF16State<V>>(c, a) : sgd_loop<V, Weights, F32State<V>>(c, a);
}

template <class V>
void sgd(const SgdConstants& c, const StepArguments& a) {
  switch (a.weights) {
    case WeightFormat::kF32:
      return sgd_on<V, F32Weights<V>>(c, a);
    case WeightFormat::kF32AndF32:
      return sgd_on<V, F32CopiedWeights<V>>(c, a);
    case WeightFormat::kF32AndBF16:
      return sgd_on<V, HalfCopiedWeights<V, false>>(c, a);
    case WeightFormat::kF32AndF16:
      return sgd_on<V, HalfCopiedWeights<V, true>>(c, a);
    case WeightFormat::kSplitBF16:
      return sgd_on<V, SplitWeights<V>>(c, a);
  }
}

#undef TESSERA_INLINE_BODY

}  // namespace
}  // namespace tessera
