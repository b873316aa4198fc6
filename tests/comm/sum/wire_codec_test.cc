// Tests the codec that sends few bits per element and one scale per run, against a plain second implementation.

#include "runtime/comm/sum/wire_codec.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tests/comm/reference.h"

namespace tessera {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Computes, in the simplest way, the values that `encode` and then `decode` must give for a run of at most 256 values.
std::vector<float> rounded_slowly(WireForm form, const std::vector<float>& values) {
  const float most = form == WireForm::kInt8 ? 127 : 7;
  float largest = 0;
  for (float value : values) largest = std::max(largest, std::fabs(value));
  if (largest < 127 * std::numeric_limits<float>::min()) return std::vector<float>(values.size(), 0.0f);
  std::vector<float> rounded;
  for (float value : values) rounded.push_back(std::nearbyintf(value * (most / largest)) * (largest / most));
  return rounded;
}

std::vector<float> values_of(const Bytes& data, DType dtype) {
  std::vector<float> values(data.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_at(data, dtype, i);
  return values;
}

std::vector<float> round_trip(WireForm form, const Bytes& data, DType dtype, float* residual = nullptr) {
  const std::size_t numel = data.size() / size_of(dtype);
  std::vector<std::uint32_t> wire(encoded_bytes(form, numel) / 4 + 1, 0xabcdef01u);
  encode(form, data.data(), dtype, numel, reinterpret_cast<std::byte*>(wire.data()), residual);
  EXPECT_EQ(wire.back(), 0xabcdef01u) << "encode wrote beyond encoded_bytes";
  std::vector<float> values(numel);
  decode(form, reinterpret_cast<const std::byte*>(wire.data()), DType::kF32, values.data(), numel);
  return values;
}

Bytes bytes_of(const std::vector<float>& values) {
  Bytes data(values.size() * 4);
  if (!values.empty()) std::memcpy(data.data(), values.data(), data.size());
  return data;
}

/// Returns the value of `dtype` nearest to a finite `value`. If two values are equally near, returns the even one.
float nearest_slowly(float value, DType dtype) {
  if (dtype == DType::kF32) return value;
  const std::uint16_t infinity = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
  std::uint16_t below = 0, above = infinity;
  while (above - below > 1) {
    const auto middle = static_cast<std::uint16_t>((below + above) / 2);
    (widen_slowly(dtype, middle) <= std::fabs(value) ? below : above) = middle;
  }
  const double low = widen_slowly(dtype, below);
  double high = widen_slowly(dtype, above);
  // Infinity counts as the number that would follow the largest finite number.
  if (above == infinity) high = 2 * low - widen_slowly(dtype, static_cast<std::uint16_t>(below - 1));
  const double middle = (low + high) / 2;
  const bool goes_up = std::fabs(value) > middle || (std::fabs(value) == middle && below % 2 == 1);
  return std::copysign(widen_slowly(dtype, goes_up ? above : below), value);
}

void write_infinity(DType dtype, Bytes& data, std::size_t i) {
  const std::uint32_t bits = dtype == DType::kF16 ? 0x7c00 : dtype == DType::kBF16 ? 0x7f80 : 0x7f800000;
  std::memcpy(data.data() + size_of(dtype) * i, &bits, size_of(dtype));
}

class WireCodec : public ::testing::TestWithParam<WireForm> {};

TEST_P(WireCodec, EachRunIsRoundedByItsLargestMagnitude) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::size_t numel : {0, 1, 2, 3, 7, 255, 256, 257, 511, 1023, 4096, 5001}) {
      const Bytes data = random_values(dtype, numel, static_cast<std::uint32_t>(numel));
      const std::vector<float> values = values_of(data, dtype), decoded = round_trip(GetParam(), data, dtype);
      for (std::size_t begin = 0; begin < numel; begin += kCodecBlock) {
        const auto end = values.begin() + static_cast<std::ptrdiff_t>(std::min(numel, begin + kCodecBlock));
        const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
        const std::vector<float> expected = rounded_slowly(GetParam(), {first, end});
        for (std::size_t i = 0; i < expected.size(); ++i)
          ASSERT_EQ(decoded[begin + i], expected[i]) << name_of(dtype) << " element " << begin + i << " of " << numel;
      }
    }
  }
}

TEST_P(WireCodec, DecodesIntoTheEncodedDtype) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::size_t numel : {0, 1, 255, 256, 700, 5001}) {
      Bytes data = random_values(dtype, numel, static_cast<std::uint32_t>(numel));
      if (numel > 600) write_infinity(dtype, data, 600);  // all values of this run become NaN
      const std::vector<float> wide = round_trip(GetParam(), data, dtype);
      std::vector<std::uint32_t> wire(encoded_bytes(GetParam(), numel) / 4);
      encode(GetParam(), data.data(), dtype, numel, reinterpret_cast<std::byte*>(wire.data()));
      Bytes decoded(numel * size_of(dtype) + 1, std::byte{0x5a});
      decode(GetParam(), reinterpret_cast<const std::byte*>(wire.data()), dtype, decoded.data(), numel);
      EXPECT_EQ(decoded.back(), std::byte{0x5a}) << "decode wrote too far";
      decoded.pop_back();
      for (std::size_t i = 0; i < numel; ++i) {
        const float value = value_at(decoded, dtype, i);
        ASSERT_TRUE(value == nearest_slowly(wide[i], dtype) || (std::isnan(value) && std::isnan(wide[i])))
            << name_of(dtype) << " element " << i << " of " << numel << ": " << value << " for " << wide[i];
      }
    }
  }
}

TEST_P(WireCodec, EncodedSizeIsTheDocumentedOne) {
  const bool is_int8 = GetParam() == WireForm::kInt8;
  EXPECT_EQ(encoded_bytes(GetParam(), 0), 0u);
  EXPECT_EQ(encoded_bytes(GetParam(), 256), is_int8 ? 260u : 132u);
  EXPECT_EQ(encoded_bytes(GetParam(), 1000), is_int8 ? 1016u : 516u);
  EXPECT_EQ(encoded_bytes(GetParam(), 257), is_int8 ? 268u : 140u);
}

TEST_P(WireCodec, NonFiniteRunsBecomeNaNAndOthersStay) {
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values(3 * kCodecBlock, 1.0f);
    values[kCodecBlock + 17] = bad;
    const std::vector<float> decoded = round_trip(GetParam(), bytes_of(values), DType::kF32);
    for (std::size_t i = 0; i < decoded.size(); ++i) ASSERT_EQ(std::isnan(decoded[i]), i / kCodecBlock == 1) << i;
  }
}

TEST_P(WireCodec, ValuesNearTheEndsOfTheRangeStayFinite) {
  for (const float large : {std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
                            std::numeric_limits<float>::denorm_min()}) {
    const std::vector<float> decoded = round_trip(GetParam(), bytes_of({large, -large, large / 3}), DType::kF32);
    for (float value : decoded) ASSERT_TRUE(std::isfinite(value)) << large;
    if (large > 1) {
      EXPECT_NEAR(decoded[0] / large, 1, 1e-6);
    }
  }
}

TEST_P(WireCodec, RoundingResidualsAddUpToTheExactSum) {
  constexpr std::size_t kNumel = 700;
  const std::vector<float> values = values_of(random_values(DType::kF32, kNumel, 5), DType::kF32);
  std::vector<float> residual(kNumel, 0.0f);
  std::vector<double> sent(kNumel), wanted(kNumel);
  constexpr int kTimes = 50;
  for (int time = 0; time < kTimes; ++time) {
    const std::vector<float> decoded = round_trip(GetParam(), bytes_of(values), DType::kF32, residual.data());
    for (std::size_t i = 0; i < kNumel; ++i) {
      sent[i] += decoded[i];
      wanted[i] += values[i];
    }
  }
  // The residual is the part that was not sent, up to rounding in fp32.
  float largest = 0;
  for (float value : values) largest = std::max(largest, std::fabs(value));
  for (std::size_t i = 0; i < kNumel; ++i) ASSERT_NEAR(sent[i] + residual[i], wanted[i], largest * kTimes * 1e-6) << i;
}

TEST_P(WireCodec, NonFiniteRunsLeaveTheirResidual) {
  std::vector<float> values(2 * kCodecBlock, 1.0f), residual(2 * kCodecBlock, 0.25f);
  values[3] = kInfinity;
  round_trip(GetParam(), bytes_of(values), DType::kF32, residual.data());
  for (std::size_t i = 0; i < kCodecBlock; ++i) ASSERT_EQ(residual[i], 0.25f) << i;
  for (std::size_t i = kCodecBlock; i < residual.size(); ++i) ASSERT_NEAR(residual[i], 0, 1e-6) << i;
}

class Seen : public SumVisitor {
 public:
  void visit(std::size_t offset, const float* values, std::size_t numel) override {
    EXPECT_EQ(offset, 1024 + seen.size());
    seen.insert(seen.end(), values, values + numel);
  }
  std::vector<float> seen;
};

TEST_P(WireCodec, SumsEqualTheTreeOfDecodedValues) {
  for (int ranks : {1, 2, 3, 5, 8, 9, 17}) {
    for (std::size_t numel : {0, 5, 256, 1000}) {
      std::vector<Bytes> decoded;
      std::vector<std::vector<std::uint32_t>> wires;
      std::vector<const std::byte*> pointers;
      for (int rank = 0; rank < ranks; ++rank) {
        const Bytes data = random_values(DType::kF32, numel, static_cast<std::uint32_t>(100 * ranks + rank));
        decoded.push_back(bytes_of(round_trip(GetParam(), data, DType::kF32)));
        auto& wire = wires.emplace_back(encoded_bytes(GetParam(), numel) / 4 + 1);
        encode(GetParam(), data.data(), DType::kF32, numel, reinterpret_cast<std::byte*>(wire.data()));
      }
      for (const auto& wire : wires) pointers.push_back(reinterpret_cast<const std::byte*>(wire.data()));
      std::vector<float> sum(numel);
      Seen visitor;
      sum_encoded(GetParam(), pointers, sum.data(), numel, &visitor, 1024);
      EXPECT_TRUE(same_bits(sum, reference_sum(decoded, DType::kF32, 0, numel))) << ranks << " x " << numel;
      EXPECT_EQ(visitor.seen, sum);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, WireCodec, ::testing::Values(WireForm::kInt8, WireForm::kInt4),
                         [](const auto& info) { return info.param == WireForm::kInt8 ? "int8" : "int4"; });

TEST(WireCoding, WritesAndAddsUpPartsAsItsFormSays) {
  constexpr std::size_t kNumel = 700, kBegin = 256, kPart = kNumel - kBegin;
  const std::array inputs = {random_values(DType::kF32, kNumel, 3), random_values(DType::kF32, kNumel, 4)};
  for (const WireForm form : {WireForm::kPlain, WireForm::kLossless, WireForm::kInt8}) {
    std::vector<float> residual(kNumel);
    const WireCoding coding(form, DType::kF32, residual.data());
    EXPECT_EQ(coding.rounds(), is_lossy(form));
    EXPECT_EQ(coding.packs().has_value(), form == WireForm::kLossless);
    std::array<std::vector<std::uint32_t>, 2> wires;
    std::array<std::vector<float>, 2> sent;
    for (std::size_t q = 0; q < inputs.size(); ++q) {
      std::fill(residual.begin(), residual.end(), 0.0f);
      wires[q].resize(coding.bytes(kPart) / sizeof(std::uint32_t));
      coding.write(inputs[q].data(), kBegin, kPart, reinterpret_cast<std::byte*>(wires[q].data()));
      const Bytes part(inputs[q].begin() + 4 * kBegin, inputs[q].end());
      const std::vector<float> values = values_of(part, DType::kF32);
      sent[q] = is_lossy(form) ? round_trip(form, part, DType::kF32) : values;
      for (std::size_t i = 0; i < kBegin; ++i) EXPECT_EQ(residual[i], 0.0f) << i;
      for (std::size_t i = 0; i < kPart; ++i) EXPECT_EQ(residual[kBegin + i], values[i] - sent[q][i]) << i;
    }
    std::vector<float> sums(kPart);
    const std::array<const std::byte*, 2> messages = {reinterpret_cast<const std::byte*>(wires[0].data()),
                                                      reinterpret_cast<const std::byte*>(wires[1].data())};
    coding.sum(messages, sums.data(), kPart, nullptr, 0);
    for (std::size_t i = 0; i < kPart; ++i) EXPECT_EQ(sums[i], sent[0][i] + sent[1][i]) << i;
  }
}

/// Parts end within a block. Each part is encoded by itself, so a call in pieces sends the same bytes as one that
/// encodes its pieces.
TEST(WireCoding, CutsPiecesFromPartsThatAreEncoded) {
  constexpr std::size_t kPart = 3 * kCodecBlock + 77;
  const Bytes data = random_values(DType::kF32, 2 * kPart, 6);
  for (const WireForm form : {WireForm::kInt8, WireForm::kInt4}) {
    const std::size_t message = encoded_bytes(form, kPart);
    Bytes all(2 * message);
    for (std::size_t q = 0; q < 2; ++q)
      encode(form, data.data() + 4 * q * kPart, DType::kF32, kPart, all.data() + q * message);
    const WireCoding now(form, DType::kF32), before(form, DType::kF32, nullptr, {all.data(), kPart});
    const auto expect_same = [&](std::size_t begin, std::size_t numel) {
      Bytes wanted(now.bytes(numel)), got(before.bytes(numel));
      now.write(data.data(), begin, numel, wanted.data());
      before.write(nullptr, begin, numel, got.data());
      EXPECT_EQ(got, wanted) << begin << " + " << numel;
    };
    for (const std::size_t part : {std::size_t{0}, kPart}) {
      expect_same(part, kPart);
      expect_same(part, 2 * kCodecBlock);
      expect_same(part + kCodecBlock, kCodecBlock);
      expect_same(part + 2 * kCodecBlock, kPart - 2 * kCodecBlock);
    }
    expect_same(2 * kPart, 0);
  }
}

}  // namespace
}  // namespace tessera
