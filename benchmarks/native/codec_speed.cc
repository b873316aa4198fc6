#include "benchmarks/native/codec_speed.h"

#include <chrono>
#include <cstdint>
#include <random>

#include "benchmarks/native/samples.h"
#include "runtime/comm/sum/lossless.h"
#include "runtime/comm/sum/wire_codec.h"

namespace tessera {
namespace {

constexpr std::size_t kNumel = std::size_t{4} << 20;
constexpr int kRounds = 5;

/// Writes `values` to `wire` and reads them back; returns the bytes that they had there.
std::size_t there_and_back(WireForm form, const std::vector<float>& values, std::vector<std::uint32_t>& wire,
                           std::vector<float>& read) {
  auto* const bytes = reinterpret_cast<std::byte*>(wire.data());
  if (form == WireForm::kLossless) {
    const std::size_t packed = pack(DType::kF32, values.data(), values.size(), bytes);
    unpack(DType::kF32, {bytes, packed}, read.data(), read.size());
    return packed;
  }
  encode(form, values.data(), DType::kF32, values.size(), bytes);
  decode(form, bytes, read.data(), read.size());
  return encoded_bytes(form, values.size());
}

}  // namespace

std::vector<CodecSpeed> measure_codecs() {
  std::mt19937 random(1);
  std::normal_distribution<float> draw;
  std::vector<float> values(kNumel), read(kNumel);
  for (float& value : values) value = draw(random);
  std::vector<std::uint32_t> wire(most_packed_bytes(DType::kF32, kNumel) / sizeof(std::uint32_t) + 1);
  std::vector<CodecSpeed> speeds;
  for (const WireForm form : {WireForm::kLossless, WireForm::kInt8, WireForm::kInt4}) {
    Samples samples;
    std::size_t bytes = there_and_back(form, values, wire, read);  // memory is touched
    for (int round = 0; round < kRounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      bytes = there_and_back(form, values, wire, read);
      const auto time = std::chrono::steady_clock::now() - begin;
      samples.ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
    }
    const auto plain = static_cast<double>(kNumel * sizeof(float));
    speeds.push_back({form, static_cast<double>(bytes) / plain, samples.median_s() / plain});
  }
  return speeds;
}

}  // namespace tessera
