#include "workshop/bench/codec_speed.h"

#include <chrono>
#include <cstdint>
#include <random>

#include "runtime/comm/sum/lossless.h"
#include "runtime/comm/sum/wire_codec.h"
#include "workshop/bench/samples.h"

namespace tessera {
namespace {

constexpr std::size_t kNumel = std::size_t{4} << 20;
constexpr int kRounds = 5;

}  // namespace

CodecRun::CodecRun(std::size_t numel)
    : values_(numel), read_(numel), wire_(most_packed_bytes(DType::kF32, numel) / sizeof(std::uint32_t) + 1) {
  std::mt19937 random(1);
  std::normal_distribution<float> draw;
  for (float& value : values_) value = draw(random);
}

std::size_t CodecRun::there_and_back(WireForm form) {
  auto* const bytes = reinterpret_cast<std::byte*>(wire_.data());
  if (form == WireForm::kLossless) {
    const std::size_t packed = pack(DType::kF32, values_.data(), values_.size(), bytes);
    unpack(DType::kF32, {bytes, packed}, read_.data(), read_.size());
    return packed;
  }
  encode(form, values_.data(), DType::kF32, values_.size(), bytes);
  decode(form, bytes, DType::kF32, read_.data(), read_.size());
  return encoded_bytes(form, values_.size());
}

std::vector<CodecSpeed> measure_codecs() {
  CodecRun codec(kNumel);
  std::vector<CodecSpeed> speeds;
  for (const WireForm form : {WireForm::kLossless, WireForm::kInt8, WireForm::kInt4}) {
    Samples samples;
    std::size_t bytes = codec.there_and_back(form);  // this call also touches the memory
    for (int round = 0; round < kRounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      bytes = codec.there_and_back(form);
      const auto time = std::chrono::steady_clock::now() - begin;
      samples.ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
    }
    speeds.push_back(
        {form, static_cast<double>(bytes) / codec.plain_bytes(), samples.median_s() / codec.plain_bytes()});
  }
  return speeds;
}

}  // namespace tessera
