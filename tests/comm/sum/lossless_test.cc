// Tests the lossless compressor of floating-point numbers: every bit is restored, and damaged input does no harm.

#include "runtime/comm/sum/lossless.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace tessera {
namespace {

using Bytes = std::vector<std::byte>;

template <class Element>
Bytes bytes_of(const std::vector<Element>& values) {
  Bytes bytes(values.size() * sizeof(Element));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<float> normal(std::size_t numel, float scale = 1e-3F) {
  std::mt19937 random(7);
  std::normal_distribution<float> draw(0, scale);
  std::vector<float> values(numel);
  for (float& value : values) value = draw(random);
  return values;
}

std::vector<std::uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<std::uint16_t> halves;
  for (const float value : values)
    halves.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16));
  return halves;
}

Bytes packed(DType dtype, const Bytes& numbers) {
  const std::size_t numel = numbers.size() / size_of(dtype);
  Bytes out(most_packed_bytes(dtype, numel));  // exact size, so that a sanitizer sees writes past the end
  out.resize(pack(dtype, numbers.data(), numel, out.data()));
  return out;
}

/// Packs and unpacks the numbers, and checks that no bit changes. Returns the packed size.
std::size_t expect_all_bits(DType dtype, const Bytes& numbers, const std::string& what) {
  const Bytes wire = packed(dtype, numbers);
  Bytes back(numbers.size(), std::byte{0x5a});
  EXPECT_TRUE(unpack(dtype, wire, back.data(), numbers.size() / size_of(dtype))) << what;
  EXPECT_EQ(back, numbers) << what;
  return wire.size();
}

double share(DType dtype, const Bytes& numbers) {
  return static_cast<double>(expect_all_bits(dtype, numbers, "share")) / static_cast<double>(numbers.size());
}

constexpr std::size_t kMany = 1 << 16;

TEST(Lossless, NormalNumbersShrinkToTheirEntropy) {
  const std::vector<float> values = normal(kMany);
  EXPECT_NEAR(share(DType::kF32, bytes_of(values)), 0.853, 0.003);
  EXPECT_NEAR(share(DType::kBF16, bytes_of(upper_halves(values))), 0.705, 0.006);
}

TEST(Lossless, OneOutlierABlockCostsAlmostNothing) {
  std::vector<float> values = normal(kMany);
  for (std::size_t i = 100; i < values.size(); i += kLosslessBlock) values[i] *= 12;
  EXPECT_LT(share(DType::kF32, bytes_of(values)), 0.86);
}

TEST(Lossless, Fp32OfBf16ValuesSendsNoLowHalves) {
  std::vector<float> values = normal(kMany);
  for (float& value : values) value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0xffff0000u);
  EXPECT_NEAR(share(DType::kF32, bytes_of(values)), 0.353, 0.004);
}

TEST(Lossless, ZerosTakeOneByteABlock) {
  EXPECT_EQ(expect_all_bits(DType::kF32, Bytes(kMany * 4), "fp32"), kMany / kLosslessBlock);
  EXPECT_EQ(expect_all_bits(DType::kBF16, Bytes(kMany * 2), "bf16"), kMany / kLosslessBlock);
  const std::vector<float> negative(kLosslessBlock, -0.0F);
  EXPECT_GT(expect_all_bits(DType::kF32, bytes_of(negative), "-0"), kLosslessBlock);
}

TEST(Lossless, NoiseGrowsByAtMostOneByteABlock) {
  std::mt19937 random(3);
  Bytes noise(kMany * 4);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::size_t numel = noise.size() / size_of(dtype);
    EXPECT_LE(expect_all_bits(dtype, noise, "noise"), noise.size() + numel / kLosslessBlock);
  }
}

TEST(Lossless, EveryNumberKeepsItsBits) {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  expect_all_bits(DType::kBF16, bytes_of(all), "every bf16, in order");
  std::shuffle(all.begin(), all.end(), std::mt19937(5));
  expect_all_bits(DType::kBF16, bytes_of(all), "every bf16");
  std::vector<std::uint32_t> wide;
  for (const std::uint16_t value : all) wide.push_back(std::uint32_t{value} << 16 | (value * 40503u & 0xffffu));
  expect_all_bits(DType::kF32, bytes_of(wide), "every upper half of fp32");
}

TEST(Lossless, EveryLengthAndSpecialValuesKeepTheirBits) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {
      0.0F,          -0.0F,         Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::denorm_min(),
      Limits::min(), Limits::max(), Limits::lowest()};
  for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{257},
                                  std::size_t{511}, std::size_t{512}, std::size_t{1000}}) {
    std::vector<float> values = normal(numel, 1);
    for (std::size_t i = 0; i < numel; i += 37) values[i] = specials[i / 37 % std::size(specials)];
    const std::string what = std::to_string(numel);
    expect_all_bits(DType::kF32, bytes_of(values), what);
    expect_all_bits(DType::kBF16, bytes_of(upper_halves(values)), what);
  }
}

// Bytes that arrive over a wire may be anything. They are refused, or read within their bounds (a sanitizer finds reads
// beyond them).
TEST(Lossless, DamageIsRefusedOrReadWithinBounds) {
  std::mt19937 random(11);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::vector<float> values = normal(4 * kLosslessBlock + 9);
    const Bytes numbers = dtype == DType::kF32 ? bytes_of(values) : bytes_of(upper_halves(values));
    const std::size_t numel = values.size();
    const Bytes good = packed(dtype, numbers);
    Bytes output(numbers.size());
    for (std::size_t size = 0; size < good.size(); ++size) {
      const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_FALSE(unpack(dtype, cut, output.data(), numel)) << size;
    }
    Bytes longer = good;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(unpack(dtype, longer, output.data(), numel));
    Bytes other_kind = good;
    other_kind[0] = std::byte{9};
    EXPECT_FALSE(unpack(dtype, other_kind, output.data(), numel));
    Bytes more_escapes = good;
    more_escapes[2] = static_cast<std::byte>(static_cast<std::uint8_t>(good[2]) + 1);
    EXPECT_FALSE(unpack(dtype, more_escapes, output.data(), numel));
    for (int i = 0; i < 2000; ++i) {
      Bytes bad = good;
      for (int k = 0; k < 3; ++k) bad[random() % bad.size()] = static_cast<std::byte>(random());
      unpack(dtype, bad, output.data(), numel);
    }
  }
}

}  // namespace
}  // namespace tessera
