#include "runtime/comm/sum/wire_codec.h"

#include <absl/container/inlined_vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "runtime/comm/sum/cpu_clones.h"
#include "runtime/comm/sum/pairwise_sum.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;

TESSERA_INLINE std::uint32_t largest_magnitude(const float* values, std::size_t numel) {
  std::uint32_t largest = 0;  // the bits of a NaN are above those of an infinity, which are above all other numbers
  for (std::size_t i = 0; i < numel; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & kMagnitude);
  return largest;
}

TESSERA_INLINE void pack_nibbles(const std::int8_t* codes, std::size_t numel, std::byte* wire) {
  const std::size_t half = (numel + 1) / 2;
  for (std::size_t i = 0; i < numel / 2; ++i)
    wire[i] = static_cast<std::byte>((codes[i] & 0xf) | ((codes[half + i] & 0xf) << 4));
  if (numel % 2 == 1) wire[half - 1] = static_cast<std::byte>(codes[half - 1] & 0xf);
}

TESSERA_INLINE void unpack_nibbles(const std::byte* wire, std::size_t numel, std::int8_t* codes) {
  const std::size_t half = (numel + 1) / 2;
  const auto* bytes = reinterpret_cast<const std::int8_t*>(wire);
  for (std::size_t i = 0; i < half; ++i)
    codes[i] = static_cast<std::int8_t>(static_cast<std::int8_t>(static_cast<std::uint8_t>(bytes[i]) << 4) >> 4);
  for (std::size_t i = 0; i < numel - half; ++i) codes[half + i] = static_cast<std::int8_t>(bytes[i] >> 4);
}

TESSERA_CPU_CLONES float encode_block(WireForm form, const float* values, std::size_t numel, std::byte* wire) {
  const WireScale scale = wire_scale(form, largest_magnitude(values, numel));
  std::array<std::int8_t, kCodecBlock> codes;
  if (scale.inverse == 0) {  // a product of 0 and an infinity or NaN is not 0
    std::fill_n(codes.begin(), numel, std::int8_t{0});
  } else {
    for (std::size_t i = 0; i < numel; ++i) codes[i] = static_cast<std::int8_t>(code_of(values[i], scale.inverse));
  }
  if (form == WireForm::kInt8) {
    std::memcpy(wire, codes.data(), numel);
  } else {
    pack_nibbles(codes.data(), numel, wire);
  }
  return scale.spacing;
}

TESSERA_CPU_CLONES void decode_block(WireForm form, float scale, const std::byte* wire, float* output,
                                     std::size_t numel) {
  if (form == WireForm::kInt8) {
    const auto* codes = reinterpret_cast<const std::int8_t*>(wire);
    for (std::size_t i = 0; i < numel; ++i) output[i] = value_of_code(codes[i], scale);
    return;
  }
  std::array<std::int8_t, kCodecBlock> codes;
  unpack_nibbles(wire, numel, codes.data());
  for (std::size_t i = 0; i < numel; ++i) output[i] = value_of_code(codes[i], scale);
}

/// Computes residual = values - decoded.
TESSERA_CPU_CLONES void subtract(const float* values, const float* decoded, float* residual, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) residual[i] = values[i] - decoded[i];
}

/// Rounds to the nearest, ties to even. A NaN stays a NaN: all NaNs of a codec have the highest bit of their mantissa
/// set.
TESSERA_CPU_CLONES void narrow_to_bf16(const float* values, std::byte* output, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    const std::uint32_t nearest = bits + 0x7fffu + ((bits >> 16) & 1);
    const auto high = static_cast<std::uint16_t>(((bits & kMagnitude) > kInfinity ? bits : nearest) >> 16);
    std::memcpy(output + i * sizeof high, &high, sizeof high);
  }
}

TESSERA_CPU_CLONES void narrow_to_f16(const float* values, std::byte* output, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const auto narrow = static_cast<_Float16>(values[i]);
    std::memcpy(output + i * sizeof narrow, &narrow, sizeof narrow);
  }
}

float scale_at(const std::byte* wire, std::size_t block) {
  float scale;
  std::memcpy(&scale, wire + block * sizeof scale, sizeof scale);
  return scale;
}

}  // namespace

std::size_t wire_bytes(WireForm form, DType dtype, std::size_t numel) {
  return is_lossy(form) ? encoded_bytes(form, numel) : numel * size_of(dtype);
}

void encode(WireForm form, const void* input, DType dtype, std::size_t numel, std::byte* wire, float* residual) {
  const std::size_t blocks = codec_blocks(numel);
  alignas(64) std::array<float, kCodecBlock> values, decoded;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t begin = block * kCodecBlock, count = std::min(kCodecBlock, numel - begin);
    const void* const from = static_cast<const std::byte*>(input) + begin * size_of(dtype);
    if (residual) {
      pairwise_sum(std::array<const void*, 1>{from}, dtype, values.data(), count);
      pairwise_sum(std::array<const void*, 2>{values.data(), residual + begin}, DType::kF32, values.data(), count);
    } else if (dtype != DType::kF32) {
      pairwise_sum(std::array<const void*, 1>{from}, dtype, values.data(), count);
    }
    const float* const block_values =
        residual || dtype != DType::kF32 ? values.data() : static_cast<const float*>(from);
    std::byte* const codes = wire + codes_at(form, blocks, block);
    const float scale = encode_block(form, block_values, count, codes);
    std::memcpy(wire + block * sizeof scale, &scale, sizeof scale);
    if (!residual || scale != scale) continue;
    decode_block(form, scale, codes, decoded.data(), count);
    subtract(values.data(), decoded.data(), residual + begin, count);
  }
}

void decode(WireForm form, const std::byte* wire, DType dtype, void* output, std::size_t numel) {
  const std::size_t blocks = codec_blocks(numel);
  alignas(64) std::array<float, kCodecBlock> values;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t begin = block * kCodecBlock, count = std::min(kCodecBlock, numel - begin);
    std::byte* const to = static_cast<std::byte*>(output) + begin * size_of(dtype);
    float* const wide = dtype == DType::kF32 ? reinterpret_cast<float*>(to) : values.data();
    decode_block(form, scale_at(wire, block), wire + codes_at(form, blocks, block), wide, count);
    if (dtype == DType::kF32) continue;
    dtype == DType::kBF16 ? narrow_to_bf16(values.data(), to, count) : narrow_to_f16(values.data(), to, count);
  }
}

void sum_encoded(WireForm form, std::span<const std::byte* const> wires, float* output, std::size_t numel,
                 SumVisitor* visitor, std::size_t offset) {
  const std::size_t blocks = codec_blocks(numel);
  absl::InlinedVector<float, 8 * kCodecBlock> decoded(wires.size() * kCodecBlock);
  absl::InlinedVector<const void*, 8> sources;
  for (std::size_t q = 0; q < wires.size(); ++q) sources.push_back(decoded.data() + q * kCodecBlock);
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t begin = block * kCodecBlock, count = std::min(kCodecBlock, numel - begin);
    const std::size_t at = codes_at(form, blocks, block);
    for (std::size_t q = 0; q < wires.size(); ++q)
      decode_block(form, scale_at(wires[q], block), wires[q] + at, decoded.data() + q * kCodecBlock, count);
    pairwise_sum(sources, DType::kF32, output + begin, count);
    if (visitor) visitor->visit(offset + begin, output + begin, count);
  }
}

void WireCoding::write(const void* input, std::size_t begin, std::size_t numel, std::byte* wire) const {
  if (encoded_.messages) return copy_encoded(begin, numel, wire);
  const std::byte* const from = static_cast<const std::byte*>(input) + begin * size_of(dtype_);
  if (rounds()) {
    encode(form_, from, dtype_, numel, wire, feedback_ ? feedback_ + begin : nullptr);
  } else {
    std::memcpy(wire, from, numel * size_of(dtype_));
  }
}

/// A message of whole blocks consists of two runs of the message that it is cut from: scales, and codes.
void WireCoding::copy_encoded(std::size_t begin, std::size_t numel, std::byte* wire) const {
  if (numel == 0) return;
  const std::size_t part_numel = encoded_.part_numel, first = begin % part_numel / kCodecBlock;
  const std::size_t blocks = codec_blocks(numel), codes = codes_at(form_, blocks, 0);
  const std::byte* const from = encoded_.messages + begin / part_numel * encoded_bytes(form_, part_numel);
  std::memcpy(wire, from + first * sizeof(float), codes);
  std::memcpy(wire + codes, from + codes_at(form_, codec_blocks(part_numel), first),
              encoded_bytes(form_, numel) - codes);
}

void WireCoding::sum(std::span<const std::byte* const> wires, float* output, std::size_t numel, SumVisitor* visitor,
                     std::size_t offset) const {
  if (rounds()) return sum_encoded(form_, wires, output, numel, visitor, offset);
  const absl::InlinedVector<const void*, 16> sources(wires.begin(), wires.end());
  visited_sum(sources, dtype_, {&output, 1}, numel, visitor, offset);
}

}  // namespace tessera
