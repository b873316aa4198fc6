// Compares CUDA kernels for the codecs of the wire with the CPU's loops. The bits must be the same.

#include "optim/cuda/device_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/arithmetic/rounding.h"
#include "runtime/comm/sum/wire_codec.h"
#include "tests/optim/device_memory.h"

namespace tessera {
namespace device_codec_test {

using DeviceCodec = DeviceKernels;

using Bytes = std::vector<std::byte>;

/// Returns elements of `dtype`, with zeros, subnormals and numbers of many magnitudes. A few blocks hold only small
/// numbers, and one block has an infinity.
Bytes elements(DType dtype, std::size_t numel) {
  std::mt19937 random(static_cast<std::uint32_t>(numel));
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-14, 6);
  Bytes data(numel * size_of(dtype));
  for (std::size_t i = 0; i < numel; ++i) {
    float value = std::ldexp(normal(random), exponent(random));
    if (i % 11 == 3) value = i % 2 == 0 ? 0.0f : -0.0f;
    if (i / kCodecBlock % 5 == 1) value *= 1e-38f;
    if (i == 3 * kCodecBlock + 17) value = -std::numeric_limits<float>::infinity();
    auto bits = __builtin_bit_cast(std::uint32_t, value);
    if (dtype == DType::kBF16) bits = bf16_nearest<std::uint32_t>(value);
    if (dtype == DType::kF16) bits = fp16_nearest<std::uint32_t>(value);
    std::memcpy(data.data() + i * size_of(dtype), &bits, size_of(dtype));
  }
  return data;
}

std::vector<float> residuals(std::size_t numel) {
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i) values[i] = std::ldexp(static_cast<float>(i % 37) - 18.0f, -9);
  return values;
}

/// Returns the messages that the CPU makes of the parts. Bytes that belong to no scale or code are 0.
Bytes encoded(const EncodedParts& parts, const Bytes& values, float* residual) {
  Bytes messages(parts.bytes());
  for (std::size_t q = 0; q < parts.parts; ++q) {
    const std::size_t first = q * parts.part_numel;
    encode(parts.form, values.data() + first * size_of(parts.dtype), parts.dtype, parts.part_numel,
           messages.data() + q * parts.part_bytes(), residual ? residual + first : nullptr);
  }
  return messages;
}

Bytes decoded(const EncodedParts& parts, const Bytes& messages) {
  Bytes values(parts.parts * parts.part_numel * size_of(parts.dtype));
  for (std::size_t q = 0; q < parts.parts; ++q) {
    decode(parts.form, messages.data() + q * parts.part_bytes(), parts.dtype,
           values.data() + q * parts.part_numel * size_of(parts.dtype), parts.part_numel);
  }
  return values;
}

/// Expects the same elements of `dtype`. Any NaN equals any other NaN, since their payloads differ on a GPU.
void expect_same_elements(DType dtype, const Bytes& got, const Bytes& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  const std::uint32_t infinity = dtype == DType::kF32 ? 0x7f800000u : dtype == DType::kBF16 ? 0x7f80u : 0x7c00u;
  const std::uint32_t magnitude = dtype == DType::kF32 ? 0x7fffffffu : 0x7fffu;
  for (std::size_t i = 0; i < wanted.size() / size_of(dtype); ++i) {
    std::uint32_t one = 0, other = 0;
    std::memcpy(&one, got.data() + i * size_of(dtype), size_of(dtype));
    std::memcpy(&other, wanted.data() + i * size_of(dtype), size_of(dtype));
    if ((one & magnitude) > infinity && (other & magnitude) > infinity) continue;
    ASSERT_EQ(one, other) << "element " << i;
  }
}

struct CodecCase {
  EncodedParts parts;
  std::string text() const {
    return std::string(name_of(parts.dtype)) + (parts.form == WireForm::kInt8 ? ", int8, " : ", int4, ") +
           std::to_string(parts.parts) + " x " + std::to_string(parts.part_numel);
  }
};

/// Returns cases with empty parts, parts that end within a block, parts of whole blocks, and parts that begin at
/// addresses that are not aligned for vectors of four elements.
std::vector<CodecCase> cases() {
  std::vector<CodecCase> all;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const WireForm form : {WireForm::kInt8, WireForm::kInt4}) {
      for (const auto& [parts, numel] :
           {std::pair{1, 0}, {1, 1}, {1, 5}, {2, 64}, {3, 255}, {1, 256}, {3, 1025}, {2, 1024}, {1, 9000}})
        all.push_back({{form, dtype, static_cast<std::size_t>(numel), static_cast<std::size_t>(parts)}});
    }
  }
  return all;
}

/// A small number of thread blocks handle several blocks of elements each, and a large number handle one block each.
constexpr unsigned kMostBlocks[] = {1, cuda::kCodecBlocksOverBus};

TEST_F(DeviceCodec, EncodedPartsHaveTheCpusBits) {
  for (const CodecCase& each : cases()) {
    for (const unsigned most : kMostBlocks) {
      SCOPED_TRACE(each.text());
      const EncodedParts& parts = each.parts;
      const Bytes data = elements(parts.dtype, parts.parts * parts.part_numel);
      const Shared<std::byte> values(data), messages(Bytes(parts.bytes() + 1));
      check(cuda::encode_parts(parts, values.data(), nullptr, messages.data(), most, nullptr));
      Bytes wanted = encoded(parts, data, nullptr);
      wanted.push_back(std::byte{0});  // the byte behind the messages does not change
      EXPECT_EQ(messages.values(), wanted);
    }
  }
}

TEST_F(DeviceCodec, ResidualsHaveTheCpusBits) {
  for (const CodecCase& each : cases()) {
    SCOPED_TRACE(each.text());
    const EncodedParts& parts = each.parts;
    const std::size_t numel = parts.parts * parts.part_numel;
    const Bytes data = elements(parts.dtype, numel);
    std::vector<float> wanted_residual = residuals(numel);
    const Shared<std::byte> values(data), messages(Bytes(parts.bytes()));
    const Shared<float> residual(wanted_residual);
    for (int time = 0; time < 2; ++time) {
      check(cuda::encode_parts(parts, values.data(), residual.data(), messages.data(), cuda::kCodecBlocksOverBus,
                               nullptr));
      EXPECT_EQ(messages.values(), encoded(parts, data, wanted_residual.data()));
      const std::vector<float> got = residual.values();
      EXPECT_TRUE(numel == 0 || std::memcmp(got.data(), wanted_residual.data(), 4 * numel) == 0);
    }
  }
}

TEST_F(DeviceCodec, DecodedPartsHaveTheCpusBits) {
  for (const CodecCase& each : cases()) {
    SCOPED_TRACE(each.text());
    const EncodedParts& parts = each.parts;
    const Bytes message = encoded(parts, elements(parts.dtype, parts.parts * parts.part_numel), nullptr);
    const Shared<std::byte> messages(message), values(Bytes(parts.parts * parts.part_numel * size_of(parts.dtype) + 1));
    check(cuda::decode_parts(parts, messages.data(), values.data(), cuda::kCodecBlocksOverBus, nullptr));
    Bytes got = values.values();
    EXPECT_EQ(got.back(), std::byte{0}) << "the byte behind the values has changed";
    got.pop_back();
    expect_same_elements(parts.dtype, got, decoded(parts, message));
  }
}

TEST_F(DeviceCodec, FormsThatDoNotRoundAreRefused) {
  const EncodedParts parts{WireForm::kLossless, DType::kF32, 256, 1};
  EXPECT_EQ(cuda::encode_parts(parts, nullptr, nullptr, nullptr, 1, nullptr), cudaErrorInvalidValue);
}

}  // namespace device_codec_test
}  // namespace tessera
