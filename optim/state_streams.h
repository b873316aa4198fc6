#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/companding.h"
#include "optim/rounding.h"
#include "optim/simd.h"
#include "optim/step_arguments.h"
#include "runtime/base/state_dtype.h"

namespace tessera {
namespace {

// Where a loop's moments come from and go to, one type for each StateDType, made of the state's memory and of room for
// the values of one block. A loop goes through blocks of kStateBlock elements; for each it calls
//   open(i)                          i: the block's first element
//   load(i, count)                   the values of elements i to i + count
//   store(i, count, values, noise)   their new values; noise: 16 random bits an element, where kNoisyStore
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

/// What the two kinds of 8-bit state share: a block's values, in fp32 until their largest is known. A block that holds
/// an infinity or a NaN gets a scale that is one, and decodes to no finite number.
template <class V, std::uint32_t kSteps>
struct BlockValues {
  static constexpr bool kNoisyStore = false;
  static constexpr bool kEncodesBlocks = true;
  using Code = Companding<V, kSteps>;

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
  /// A scale whose inverse would overflow counts as 0, and so do the block's values.
  TESSERA_ALWAYS_INLINE void close(std::size_t i) {
    constexpr float kSmallestNormal = 0x1p-126f;
    const float most = __builtin_bit_cast(float, V::largest(largest));
    scale = most * (1.0f / Code::kLargest);
    const bool vanishes = scale < kSmallestNormal;
    inverse = vanishes ? 0.0f : 1.0f / scale;
    scales[i / kStateBlock] = vanishes ? 0.0f : scale;
  }
};

/// A first moment: int8, the sign and a companded magnitude.
template <class V>
struct SignedBlockState : BlockValues<V, 128> {
  using Base = BlockValues<V, 128>;
  using Code = typename Base::Code;
  using Float = typename V::Float;
  std::int8_t* data;

  explicit TESSERA_ALWAYS_INLINE SignedBlockState(const StateArgument& a, float* values)
      : Base(a, values), data(static_cast<std::int8_t*>(a.data)) {}
  TESSERA_ALWAYS_INLINE Float load(std::size_t i, std::size_t count) const {
    const typename V::Int code = V::widen(V::stream(data + i, count));
    const typename V::Int sign = code >> 31;  // 0 or -1
    const Float magnitude = Code::decode((code ^ sign) - sign) * Base::scale;
    return V::float_of(V::bits_of(magnitude) | (typename V::Bits(code) & 0x80000000u));
  }
  TESSERA_ALWAYS_INLINE void store(std::size_t i, std::size_t, Float moment, typename V::Bits) {
    Base::keep(i, moment);
  }
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, typename V::Bits noise) const {
    const typename V::Bits bits = V::bits_of(Base::kept(i));
    const typename V::Bits code = Code::encode(V::float_of(bits & 0x7fffffffu) * Base::inverse, noise);
    const auto sign = typename V::Bits(typename V::Int(bits) >> 31);  // 0 or -1
    V::store(data + i, count, V::template narrow<std::int8_t>((code ^ sign) - sign));
  }
};

/// A second moment: uint8, its companded square root. Above zero it never gets the code 0: dividing by the root of a
/// moment that vanished would blow a step up, while one that is kept too large only makes a step smaller.
template <class V>
struct RootBlockState : BlockValues<V, 256> {
  using Base = BlockValues<V, 256>;
  using Code = typename Base::Code;
  using Float = typename V::Float;
  std::uint8_t* data;

  explicit TESSERA_ALWAYS_INLINE RootBlockState(const StateArgument& a, float* values)
      : Base(a, values), data(static_cast<std::uint8_t*>(a.data)) {}
  TESSERA_ALWAYS_INLINE Float load(std::size_t i, std::size_t count) const {
    const Float root = Code::decode(V::widen(V::stream(data + i, count))) * Base::scale;
    return root * root;
  }
  TESSERA_ALWAYS_INLINE void store_root(std::size_t i, Float root) { Base::keep(i, root); }  ///< of the new moment
  TESSERA_ALWAYS_INLINE void encode(std::size_t i, std::size_t count, typename V::Bits noise) const {
    const Float root = Base::kept(i);
    const typename V::Bits code = Code::encode(root * Base::inverse, noise);
    const typename V::Bits least = root > 0.0f ? typename V::Bits{} + 1 : typename V::Bits{};
    V::store(data + i, count, V::template narrow<std::uint8_t>(code > least ? code : least));
  }
};

}  // namespace
}  // namespace tessera
