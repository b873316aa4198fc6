#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/block_codes.h"
#include "optim/arithmetic/for_groups.h"
#include "optim/arithmetic/rounding.h"
#include "optim/arithmetic/simd.h"
#include "optim/arithmetic/step_arguments.h"
#include "optim/rules/rule.h"
#include "runtime/base/state_dtype.h"

namespace tessera {
namespace {

// These types read and write a loop's moments, one type for each StateDType. An object is made from the state's memory,
// and from memory for the values of two blocks. A loop goes through blocks of kStateBlock elements, and calls for each
// block
//   open(begin, end)           the block's elements
//   load(i, count)             the values of the elements [i, i + count)
//   store(i, count, values)    their new values; if kKeepsRoot is true, the new values' square roots
// A code may depend on the block's largest value. So, if kIsNarrow is true, the loop then calls
//   close(begin)
//   encode(i, count, noise)    for all elements of the block once more, at the latest before the next block's close;
//                              noise: kNoiseBits random bits for each element

/// fp32: values are loaded and stored as they are.
template <class V>
struct F32State {
  static constexpr bool kIsNarrow = false, kKeepsRoot = false;
  float* data;

  explicit TESSERA_ALWAYS_INLINE F32State(const StateArgument& a, float*) : data(static_cast<float*>(a.data)) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t, std::size_t) const {}
  TESSERA_ALWAYS_INLINE typename V::FloatGroup load(std::size_t i, std::size_t count) const {
    return V::stream(data + i, count);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, const typename V::FloatGroup& values) const {
    V::store(data + i, count, values);
  }
};

/// The number of values that are kept: two blocks, in fp32, which fit in the first-level cache.
inline constexpr std::size_t kKeptValues = 2 * kStateBlock;
template <class V>
struct BlockValues {
  float* values;  ///< [kKeptValues]

  TESSERA_ALWAYS_INLINE void keep(std::size_t i, const typename V::FloatGroup& kept) const {
    V::store(values + i % kKeptValues, V::kWidth, kept);
  }
  TESSERA_ALWAYS_INLINE typename V::FloatGroup kept(std::size_t i) const {
    return V::load(values + i % kKeptValues, V::kWidth);
  }
};

/// bf16, rounded stochastically. A step changes a second moment by about a thousandth of its value, which is less than
/// bf16 can resolve. If the moment were rounded to nearest, it would never change.
template <class V>
struct BF16State : BlockValues<V> {
  static constexpr bool kIsNarrow = true, kKeepsRoot = false;
  static constexpr int kNoiseBits = 16;
  std::uint16_t* data;

  explicit TESSERA_ALWAYS_INLINE BF16State(const StateArgument& a, float* values)
      : BlockValues<V>{values}, data(static_cast<std::uint16_t*>(a.data)) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t, std::size_t) const {}
  TESSERA_ALWAYS_INLINE typename V::FloatGroup load(std::size_t i, std::size_t count) const {
    const auto words = V::stream(data + i, count);
    const typename V::BitGroup bits = V::join(words, decltype(words){});
    typename V::FloatGroup values;
    for (int v = 0; v < V::kVectors; ++v) values[v] = V::float_of(bits[v]);
    return values;
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t, const typename V::FloatGroup& values) const {
    this->keep(i, values);
  }
  TESSERA_ALWAYS_INLINE void close(std::size_t) const {}
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, const typename V::BitGroup& noise) const {
    const typename V::FloatGroup values = this->kept(i);
    typename V::BitGroup rounded;
    for (int v = 0; v < V::kVectors; ++v) rounded[v] = bf16_stochastic(values[v], noise[v]);
    V::store(data + i, count, V::tops_in_order(rounded));
  }
};

/// 8 bits, in the code `BlockCode`, with one scale for each block. A whole block is decoded before the formula is
/// computed, so that the processor can overlap the divisions of several elements. If each element were decoded just
/// before its formula, there would be too many instructions between two divisions.
template <class V, class BlockCode>
struct BlockState : BlockValues<V> {
  static constexpr bool kIsNarrow = true, kKeepsRoot = BlockCode::kIsOfRoot;
  static constexpr int kNoiseBits = BlockCode::Code::kNoiseBits;
  using Byte = typename BlockCode::Byte;

  Byte* data;
  float* scales;
  float half_inverse = 0.0f;
  typename V::Bits largest = {};

  explicit TESSERA_ALWAYS_INLINE BlockState(const StateArgument& a, float* values)
      : BlockValues<V>{values}, data(static_cast<Byte*>(a.data)), scales(a.scales) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t begin, std::size_t end) {
    const float scale = scales[begin / kStateBlock];
    for_groups<V>(begin, end, [&](std::size_t i, std::size_t count) TESSERA_INLINE_BODY {
      const typename V::template Group<typename V::Int> codes = V::stream_integers(data + i, count);
      typename V::FloatGroup decoded;
      for (int v = 0; v < V::kVectors; ++v) decoded[v] = BlockCode::decode(codes[v], scale);
      this->keep(i, decoded);
    });
    largest = typename V::Bits{};
  }
  TESSERA_ALWAYS_INLINE typename V::FloatGroup load(std::size_t i, std::size_t) const { return this->kept(i); }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t, const typename V::FloatGroup& values) {
    this->keep(i, values);
    for (int v = 0; v < V::kVectors; ++v) {
      typename V::Bits magnitude = V::bits_of(values[v]);   // NaN > infinity > finite when compared as integers
      if constexpr (!kKeepsRoot) magnitude &= 0x7fffffffu;  // roots with a sign bit are NaNs, the largest integers
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  TESSERA_ALWAYS_INLINE void close(std::size_t begin) {
    const BlockScale next = block_scale<typename BlockCode::Code>(__builtin_bit_cast(float, V::largest(largest)));
    scales[begin / kStateBlock] = next.scale;
    half_inverse = next.half_inverse;
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, const typename V::BitGroup& noise) const {
    const typename V::FloatGroup values = this->kept(i);
    typename V::BitGroup bits, magnitudes;
    for (int v = 0; v < V::kVectors; ++v) {
      bits[v] = V::bits_of(values[v]);
      magnitudes[v] = BlockCode::magnitude(values[v], half_inverse, noise[v]);
    }
    const typename V::Words codes = BlockCode::code(V::template words<kNoiseBits>(magnitudes), V::tops(bits));
    V::store(data + i, count, V::template bytes<Byte>(codes));
  }
};

/// The type of stream for states of dtype kDType with the code kCode.
template <class V, StateDType kDType, StateCode kCode>
struct StateStreamOf {
  using Type = F32State<V>;
};
template <class V, StateCode kCode>
requires(kCode != StateCode::kExact) struct StateStreamOf<V, StateDType::kBF16, kCode> {
  using Type = BF16State<V>;
};
template <class V>
struct StateStreamOf<V, StateDType::k8Bit, StateCode::kSigned> {
  using Type = BlockState<V, SignedBlockCode<V>>;
};
template <class V>
struct StateStreamOf<V, StateDType::k8Bit, StateCode::kRoot> {
  using Type = BlockState<V, RootBlockCode<V>>;
};
template <class V, StateDType kDType, StateCode kCode>
using StateStream = typename StateStreamOf<V, kDType, kCode>::Type;

}  // namespace
}  // namespace tessera
