#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/block_codes.h"
#include "optim/rounding.h"
#include "optim/rules/rule.h"
#include "optim/simd.h"
#include "optim/step_arguments.h"
#include "runtime/base/state_dtype.h"

namespace tessera {
namespace {

// Where a loop's moments come from and go to, one type for each StateDType, made of the state's memory and of room for
// the values of one block. A loop goes through blocks of kStateBlock elements; for each it calls
//   open(i)                          i: the block's first element
//   load(i, count)                   the values of elements i to i + count
//   store(i, count, values, noise)   their new values; noise: 16 random bits an element, where kNoisyStore. RootBlockState
//                                    takes their square roots
// and then, where kEncodesBlocks, which is where a code needs the block's largest value,
//   close(i)
//   encode(i, count, noise)          for all elements of the block once more

template <class V>
struct F32State {
  static constexpr bool kNoisyStore = false;
  static constexpr bool kEncodesBlocks = false;
  float* data;

  explicit TESSERA_ALWAYS_INLINE F32State(const StateArgument& a, float*) : data(static_cast<float*>(a.data)) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t) const {}
  TESSERA_ALWAYS_INLINE typename V::Float load(std::size_t i, std::size_t count) const {
    return V::stream(data + i, count);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, typename V::Float values, typename V::Bits) const {
    V::store(data + i, count, values);
  }
};

/// bf16, rounded stochastically: a second moment moves by a thousandth a step, less than bf16 can resolve, and rounded
/// to nearest it would stand still.
template <class V>
struct BF16State {
  static constexpr bool kNoisyStore = true;
  static constexpr bool kEncodesBlocks = false;
  std::uint16_t* data;

  explicit TESSERA_ALWAYS_INLINE BF16State(const StateArgument& a, float*)
      : data(static_cast<std::uint16_t*>(a.data)) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t) const {}
  TESSERA_ALWAYS_INLINE typename V::Float load(std::size_t i, std::size_t count) const {
    return V::float_of(V::widen(V::stream(data + i, count)) << 16);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t count, typename V::Float values,
                                   typename V::Bits noise) const {
    V::store(data + i, count, V::template narrow<std::uint16_t>(bf16_stochastic(values, noise)));
  }
};

/// What the two kinds of 8-bit state share: a block's values, in fp32 until their largest is known.
template <class V, class BlockCode>
struct BlockValues {
  static constexpr bool kNoisyStore = false;
  static constexpr bool kEncodesBlocks = true;

  float* scales;
  float* values;  ///< [kStateBlock]
  float scale = 0.0f, inverse = 0.0f;
  typename V::Bits largest = {};

  explicit TESSERA_ALWAYS_INLINE BlockValues(const StateArgument& a, float* values)
      : scales(a.scales), values(values) {}
  TESSERA_ALWAYS_INLINE void open(std::size_t i) {
    scale = scales[i / kStateBlock];
    largest = typename V::Bits{};
  }
  TESSERA_ALWAYS_INLINE void keep(std::size_t i, typename V::Float kept) {
    V::store(values + i % kStateBlock, V::kWidth, kept);
    const typename V::Bits magnitude = V::bits_of(kept) & 0x7fffffffu;  // as integers NaN > infinity > finite
    largest = magnitude > largest ? magnitude : largest;
  }
  TESSERA_ALWAYS_INLINE typename V::Float kept(std::size_t i) const {
    return V::load(values + i % kStateBlock, V::kWidth);
  }
  TESSERA_ALWAYS_INLINE void close(std::size_t i) {
    const BlockScale next = block_scale<typename BlockCode::Code>(__builtin_bit_cast(float, V::largest(largest)));
    scales[i / kStateBlock] = next.scale;
    inverse = next.inverse;
  }
};

template <class V>
struct SignedBlockState : BlockValues<V, SignedBlockCode<V>> {
  using Code = SignedBlockCode<V>;
  using Base = BlockValues<V, Code>;
  std::int8_t* data;

  explicit TESSERA_ALWAYS_INLINE SignedBlockState(const StateArgument& a, float* values)
      : Base(a, values), data(static_cast<std::int8_t*>(a.data)) {}
  TESSERA_ALWAYS_INLINE typename V::Float load(std::size_t i, std::size_t count) const {
    return Code::decode(V::widen(V::stream(data + i, count)), Base::scale);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t, typename V::Float moment, typename V::Bits) {
    Base::keep(i, moment);
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, typename V::Bits noise) const {
    V::store(data + i, count, V::template narrow<std::int8_t>(Code::encode(Base::kept(i), Base::inverse, noise)));
  }
};

template <class V>
struct RootBlockState : BlockValues<V, RootBlockCode<V>> {
  using Code = RootBlockCode<V>;
  using Base = BlockValues<V, Code>;
  std::uint8_t* data;

  explicit TESSERA_ALWAYS_INLINE RootBlockState(const StateArgument& a, float* values)
      : Base(a, values), data(static_cast<std::uint8_t*>(a.data)) {}
  TESSERA_ALWAYS_INLINE typename V::Float load(std::size_t i, std::size_t count) const {
    return Code::decode(V::widen(V::stream(data + i, count)), Base::scale);
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t, typename V::Float root, typename V::Bits) {
    Base::keep(i, root);
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, typename V::Bits noise) const {
    V::store(data + i, count, V::template narrow<std::uint8_t>(Code::encode(Base::kept(i), Base::inverse, noise)));
  }
};

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
  using Type = SignedBlockState<V>;
};
template <class V>
struct StateStreamOf<V, StateDType::k8Bit, StateCode::kRoot> {
  using Type = RootBlockState<V>;
};
template <class V, StateDType kDType, StateCode kCode>
using StateStream = typename StateStreamOf<V, kDType, kCode>::Type;

}  // namespace
}  // namespace tessera
