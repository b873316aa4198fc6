#include "workshop/bench/codec_speed.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>

#include "runtime/comm/sum/lossless.h"
#include "runtime/comm/sum/sign_codec.h"
#include "runtime/comm/sum/wire_codec.h"
#include "workshop/bench/samples.h"

namespace tessera {
namespace {

constexpr std::size_t kNumel = std::size_t{4} << 20;
constexpr int kRounds = 5;

template <class Body>
std::int64_t nanoseconds_of_codec(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

/// Makes a pass of kCodecPasses.
void make(const CodecPass& pass, std::vector<float>& values, std::vector<float>& residual,
          std::vector<std::uint32_t>& wire) {
  const std::size_t numel = values.size();
  auto* const message = reinterpret_cast<std::byte*>(wire.data());
  float* const kept = pass.has_residual ? residual.data() : nullptr;
  if (pass.has_signs()) {
    return kept ? encode_signs(kept, values.data(), numel, wire.data())
                : cast_votes(values.data(), numel, /*turn=*/0, wire.data());
  }
  pass.encodes ? encode(pass.form, values.data(), DType::kF32, numel, message, kept)
               : decode(pass.form, message, DType::kF32, values.data(), numel);
}

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
      samples.ns.push_back(nanoseconds_of_codec([&] { bytes = codec.there_and_back(form); }));
    }
    speeds.push_back(
        {form, static_cast<double>(bytes) / codec.plain_bytes(), samples.median_s() / codec.plain_bytes()});
  }
  return speeds;
}

std::vector<PassTiming> bench_codecs(std::size_t numel, int rounds) {
  std::mt19937 random(1);
  std::normal_distribution<float> draw;
  std::vector<float> values(numel), residual(numel);
  for (float& value : values) value = draw(random);
  std::vector<std::uint32_t> wire(encoded_bytes(WireForm::kInt8, numel) / sizeof(std::uint32_t));
  std::vector<PassTiming> timings;
  for (const CodecPass& pass : kCodecPasses) {
    PassTiming& timing = timings.emplace_back(PassTiming{pass.name, numel, pass.bytes(numel), {}, {}});
    std::vector<std::byte> from(timing.bytes / 2), to(timing.bytes / 2);
    for (int round = -1; round < rounds; ++round) {
      const std::int64_t copy_ns = nanoseconds_of_codec([&] { std::memcpy(to.data(), from.data(), from.size()); });
      const std::int64_t pass_ns = nanoseconds_of_codec([&] { make(pass, values, residual, wire); });
      if (round < 0) continue;
      timing.limit.ns.push_back(copy_ns);
      timing.pass.ns.push_back(pass_ns);
    }
  }
  return timings;
}

}  // namespace tessera
