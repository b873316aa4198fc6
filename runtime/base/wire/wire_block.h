#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/always_inline.h"
#include "tessera/dtype.h"

namespace tessera {

// This header has the lossy codecs of WireForm: the layout of a message, and the arithmetic of one element. Loops on
// the host (runtime/comm/sum/wire_codec.h) and kernels of a GPU (optim/cuda/device_codec.h) use this code, so both give
// the same bits. Every operation is rounded separately, so this code must be compiled without contraction of a * b + c.
//
// A message of n elements has two parts. The first part has the fp32 scales, one for each block of kCodecBlock
// elements; the last block may have fewer elements. The second part has the codes, block by block. A code of int8 is
// one byte. A code of int4 is half a byte: in a block of m elements, with half = (m + 1) / 2, element i < half is in
// the low bits of byte i, and element half + i in its high bits.

inline constexpr std::size_t kCodecBlock = 256;

/// Returns the number of blocks of a message of `numel` elements.
TESSERA_ALWAYS_INLINE constexpr std::size_t codec_blocks(std::size_t numel) {
  return (numel + kCodecBlock - 1) / kCodecBlock;
}

/// Returns the number of bytes of the codes of `numel` elements of one block.
TESSERA_ALWAYS_INLINE constexpr std::size_t code_bytes(WireForm form, std::size_t numel) {
  return form == WireForm::kInt8 ? numel : (numel + 1) / 2;
}

/// Returns the offset, in bytes, of the codes of `block` in a message of `blocks` blocks.
TESSERA_ALWAYS_INLINE constexpr std::size_t codes_at(WireForm form, std::size_t blocks, std::size_t block) {
  return blocks * sizeof(float) + block * code_bytes(form, kCodecBlock);
}

/// Returns the number of bytes of `numel` elements in `form`, which is lossy. It is a multiple of 4.
TESSERA_ALWAYS_INLINE constexpr std::size_t encoded_bytes(WireForm form, std::size_t numel) {
  const std::size_t blocks = codec_blocks(numel), whole = numel / kCodecBlock;
  return (codes_at(form, blocks, whole) + code_bytes(form, numel % kCodecBlock) + 3) / 4 * 4;
}

/// The scale of a block. An element is encoded as the whole number nearest to value * inverse, and is decoded as code *
/// spacing.
struct WireScale {
  float spacing = 0;  ///< distance between the values of neighbouring codes
  float inverse = 0;  ///< if it is 0, all codes of the block are 0, whatever its values are
};

/// Returns the scale of a block whose largest magnitude has the bits `largest` (a float without its sign). As integers,
/// the bits of a NaN are above the bits of an infinity, and these are above the bits of all other numbers.
TESSERA_ALWAYS_INLINE WireScale wire_scale(WireForm form, std::uint32_t largest) {
  constexpr std::uint32_t kInfinity = 0x7f800000u, kQuietNaN = 0x7fc00000u;
  constexpr float kSmallest = 127 * 0x1p-126f, kLargest = 0x1.fffffep127f;
  if (largest >= kInfinity) return {__builtin_bit_cast(float, kQuietNaN), 0};
  const float magnitude = __builtin_bit_cast(float, largest), most = form == WireForm::kInt8 ? 127.0f : 7.0f;
  if (magnitude < kSmallest) return {};
  float spacing = magnitude / most;
  // The largest code must not be decoded as an infinity, so the spacing is then the next smaller number.
  if (spacing * most > kLargest) spacing = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, spacing) - 1);
  return {spacing, most / magnitude};
}

/// Returns the code of an element: the nearest whole number to value * inverse, ties to even. REQUIRES: the magnitude
/// of value * inverse is below 2^22. The number 1.5 * 2^23, added to the product, leaves that whole number in the low
/// bits of the sum.
TESSERA_ALWAYS_INLINE std::int32_t code_of(float value, float inverse) {
  constexpr float kRounder = 12582912.0f;
  return __builtin_bit_cast(std::int32_t, value * inverse + kRounder) - __builtin_bit_cast(std::int32_t, kRounder);
}

/// Returns the value of a code.
TESSERA_ALWAYS_INLINE float value_of_code(std::int32_t code, float spacing) {
  return static_cast<float>(code) * spacing;
}

}  // namespace tessera
