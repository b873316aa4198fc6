// This file makes outer steps on a GPU. Each thread computes some elements by itself. This file is compiled without
// contraction of a * b + c into one rounding, like the CPU's loops.

#include <algorithm>

#include "optim/arithmetic/rounding.h"
#include "optim/cuda/device_outer.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kOuterThreads = 256;
constexpr std::size_t kOuterBlocksAProcessor = 32;

__device__ std::size_t first_outer_element() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ std::size_t all_outer_threads() { return std::size_t{gridDim.x} * blockDim.x; }

template <OuterWork kWork>
__global__ void make_outer_pass(OuterRun run) {
  for (std::size_t i = first_outer_element(); i < run.numel; i += all_outer_threads()) outer_element<kWork>(run, i);
}

template <WeightFormat kFormat>
__global__ void put_weights(StepArguments to, const float* masters) {
  for (std::size_t i = first_outer_element(); i < to.numel; i += all_outer_threads()) {
    const float value = masters[i];
    if constexpr (kFormat == WeightFormat::kSplitBF16) {
      const std::uint32_t bits = splittable<std::uint32_t>(value);
      static_cast<std::uint16_t*>(to.parameter)[i] = static_cast<std::uint16_t>(split_high(bits));
      if (to.low != nullptr) to.low[i] = static_cast<std::int16_t>(static_cast<std::uint16_t>(split_low(bits)));
    } else {
      if (to.master != nullptr) to.master[i] = value;
    }
    if constexpr (kFormat == WeightFormat::kF32AndF32) static_cast<float*>(to.parameter)[i] = value;
    if constexpr (kFormat == WeightFormat::kF32AndBF16)
      static_cast<std::uint16_t*>(to.parameter)[i] = static_cast<std::uint16_t>(bf16_nearest<std::uint32_t>(value));
    if constexpr (kFormat == WeightFormat::kF32AndF16)
      static_cast<std::uint16_t*>(to.parameter)[i] = static_cast<std::uint16_t>(fp16_nearest<std::uint32_t>(value));
  }
}

using PutKernel = void (*)(StepArguments, const float*);

PutKernel put_kernel_for(WeightFormat weights) {
  switch (weights) {
    case WeightFormat::kF32:
      return put_weights<WeightFormat::kF32>;
    case WeightFormat::kF32AndF32:
      return put_weights<WeightFormat::kF32AndF32>;
    case WeightFormat::kF32AndBF16:
      return put_weights<WeightFormat::kF32AndBF16>;
    case WeightFormat::kF32AndF16:
      return put_weights<WeightFormat::kF32AndF16>;
    case WeightFormat::kSplitBF16:
      return put_weights<WeightFormat::kSplitBF16>;
  }
  return nullptr;
}

/// Calls `launch_blocks(blocks)` with as many blocks as are useful for `numel` elements. Does nothing if
/// `numel` is 0.
template <class Launch>
cudaError_t launch_over_elements(std::size_t numel, const Launch& launch_blocks) {
  if (numel == 0) return cudaSuccess;
  int count = 0;
  if (const cudaError_t error = multiprocessors(count); error != cudaSuccess) return error;
  const std::size_t needed = (numel + kOuterThreads - 1) / kOuterThreads;
  return launch_blocks(static_cast<unsigned>(std::min(needed, std::size_t(count) * kOuterBlocksAProcessor)));
}

}  // namespace

cudaError_t outer_pass(const OuterRun& run, cudaStream_t stream) {
  using PassKernel = void (*)(OuterRun);
  const PassKernel kernel =
      with_outer_work(run.work, [&]<OuterWork kWork>() -> PassKernel { return make_outer_pass<kWork>; });
  return launch_over_elements(run.numel,
                              [&](unsigned blocks) { return launch(kernel, blocks, kOuterThreads, stream, run); });
}

cudaError_t write_weights(const StepArguments& to, const float* masters, cudaStream_t stream) {
  const PutKernel kernel = put_kernel_for(to.weights);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return launch_over_elements(
      to.numel, [&](unsigned blocks) { return launch(kernel, blocks, kOuterThreads, stream, to, masters); });
}

}  // namespace tessera::cuda
