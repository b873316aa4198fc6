#include <random>
#include <vector>

#include "optim/cuda/device_codec.h"
#include "optim/cuda/device_signs.h"
#include "workshop/bench/codec_speed.h"
#include "workshop/bench/device_timing.h"

namespace tessera {
namespace {

/// Fills memory with `numel` fp32 numbers of a normal distribution, which repeat after 2^20 numbers.
absl::Status fill_with_normal_numbers(const TimedMemory& memory, std::size_t numel) {
  std::mt19937 random(1);
  std::normal_distribution<float> draw;
  std::vector<float> values(std::min<std::size_t>(numel, 1 << 20));
  for (float& value : values) value = draw(random);
  for (std::size_t begin = 0; begin < numel; begin += values.size()) {
    const std::size_t count = std::min(values.size(), numel - begin);
    TESSERA_RETURN_IF_ERROR(status_of_cuda(
        cudaMemcpy(memory.as<float>() + begin, values.data(), 4 * count, cudaMemcpyHostToDevice), "cudaMemcpy"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<PassTiming>> bench_device_codecs(std::size_t numel, int rounds) {
  // This number of thread blocks is so large that each warp has one block of elements or a few.
  constexpr unsigned kWholeGpu = 1 << 20;
  TESSERA_ASSIGN_OR_RETURN(const CopyLimit limit, CopyLimit::make());
  TESSERA_ASSIGN_OR_RETURN(const TimedMemory values, TimedMemory::of(4 * numel));
  TESSERA_ASSIGN_OR_RETURN(const TimedMemory residual, TimedMemory::of(4 * numel));
  TESSERA_ASSIGN_OR_RETURN(const TimedMemory message, TimedMemory::of(encoded_bytes(WireForm::kInt8, numel)));
  TESSERA_RETURN_IF_ERROR(fill_with_normal_numbers(values, numel));
  std::vector<PassTiming> timings;
  for (const CodecPass& pass : kCodecPasses) {
    const EncodedParts parts{pass.form, DType::kF32, numel, 1};
    float* const kept = pass.has_residual ? residual.as<float>() : nullptr;
    const auto queue = [&] {
      const cudaError_t error =
          pass.has_signs() ? cuda::encode_sign_messages(pass.signs(numel, kept), values.as<float>(),
                                                        message.as<std::uint32_t>(), kWholeGpu, nullptr)
          : pass.encodes
              ? cuda::encode_parts(parts, values.as<void>(), kept, message.as<std::byte>(), kWholeGpu, nullptr)
              : cuda::decode_parts(parts, message.as<std::byte>(), values.as<void>(), kWholeGpu, nullptr);
      return status_of_cuda(error, pass.name);
    };
    PassTiming& timing = timings.emplace_back(PassTiming{pass.name, numel, pass.bytes(numel), {}, {}});
    TESSERA_RETURN_IF_ERROR(limit.time(timing, rounds, queue));
  }
  return timings;
}

}  // namespace tessera
