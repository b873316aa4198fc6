// Compiled without contraction of a * b + c into one rounding, like the CPU's loops.

#include "optim/cuda/device_step.h"

#include <math.h>

#include <algorithm>

#include "optim/adam_element.h"
#include "optim/cuda/device_runs.cuh"
#include "optim/cuda/launch.h"
#include "optim/noise.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;

__global__ void decide(StepRequest request, const double* sum_of_squares, const std::uint8_t* used,
                       std::int64_t* steps, AdamConstants* constants, int parameters, DeviceDecision* decision) {
  // Every thread decides alike; the first one says so.
  const double norm = sqrt(*sum_of_squares) * request.mean;
  const bool is_skipped = !isfinite(*sum_of_squares);
  double clip = 1.0;
  if (request.max_norm > 0) {
    const double limit = request.max_norm / (norm + 1e-6);
    if (limit < clip) clip = limit;
  }
  const auto gradient_scale = static_cast<float>(request.mean * clip);
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (first == 0) {
    decision->grad_norm = norm;
    decision->gradient_scale = gradient_scale;
    decision->is_skipped = is_skipped ? 1 : 0;
    decision->applied += is_skipped ? 0 : 1;
    decision->skipped += is_skipped ? 1 : 0;
  }
  if (is_skipped) return;
  for (int p = first; p < parameters; p += static_cast<int>(gridDim.x * blockDim.x)) {
    if (!used[p]) continue;
    constants[p] = adam_constants(request.adam, ++steps[p], request.lr, gradient_scale);
  }
}

/// The byte that a code is kept in.
struct FirstCode : SignedBlockCode<ScalarLane> {
  using Byte = std::int8_t;
};
struct SecondCode : RootBlockCode<ScalarLane> {
  using Byte = std::uint8_t;
};

template <WeightFormat kWeights, StateDType kStates>
__global__ void __launch_bounds__(kThreads)
    adam(StepArguments a, std::uint64_t stream, const DeviceDecision* decision, const std::int64_t* step,
         const AdamConstants* constants) {
  if (decision->is_skipped) return;
  const AdamConstants c = *constants;
  const NoiseKey key = noise_key(stream, *step);
  const std::size_t in_warp = threadIdx.x % kWarp * kPerThread;
  const std::size_t warp = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const std::size_t warps = std::size_t{gridDim.x} * kThreads / kWarp;
  for (std::size_t begin = warp * kStateBlock; begin < a.numel; begin += warps * kStateBlock) {
    const std::size_t i = begin + in_warp;
    const std::size_t left = i < a.numel ? a.numel - i : 0;
    // All loads before the first use, so that they are under way together.
    const Run<float> gradient = load_run(a.gradient + i, left);
    Run<float> weight = Weights<kWeights>::load(a, i, left);
    Run<float> first = Moment<kStates>::template load<FirstCode>(a.state0, i, left);
    Run<float> second = Moment<kStates>::template load<SecondCode>(a.state1, i, left);
    Run<std::uint32_t> first_noise = {}, second_noise = {};
    for_run([&](int k) {
      const AdamElement<ScalarLane> next =
          adam_element<ScalarLane>(c, gradient.values[k], weight.values[k], first.values[k], second.values[k]);
      weight.values[k] = next.weight;
      first.values[k] = next.first;
      second.values[k] = kStates == StateDType::k8Bit ? next.root : next.second;
      if constexpr (kStates != StateDType::kF32) {
        const std::uint32_t element = a.first_element + static_cast<std::uint32_t>(i) + static_cast<std::uint32_t>(k);
        const std::uint32_t noise = noise_at(key, element * kNoiseStride);
        first_noise.values[k] = noise & 0xffffu;
        second_noise.values[k] = noise >> 16;
      }
    });
    Weights<kWeights>::store(a, i, left, weight);
    Moment<kStates>::template store<FirstCode>(a.state0, i, left, first, first_noise);
    Moment<kStates>::template store<SecondCode>(a.state1, i, left, second, second_noise);
  }
}

using Kernel = void (*)(StepArguments, std::uint64_t, const DeviceDecision*, const std::int64_t*, const AdamConstants*);

template <WeightFormat kWeights>
Kernel kernel_on(StateDType states) {
  switch (states) {
    case StateDType::kF32: return adam<kWeights, StateDType::kF32>;
    case StateDType::kBF16: return adam<kWeights, StateDType::kBF16>;
    case StateDType::k8Bit: return adam<kWeights, StateDType::k8Bit>;
  }
  return nullptr;
}

Kernel kernel_of(const StepArguments& a) {
  switch (a.weights) {
    case WeightFormat::kF32: return kernel_on<WeightFormat::kF32>(a.states);
    case WeightFormat::kF32AndF32: return kernel_on<WeightFormat::kF32AndF32>(a.states);
    case WeightFormat::kF32AndBF16: return kernel_on<WeightFormat::kF32AndBF16>(a.states);
    case WeightFormat::kF32AndF16: return kernel_on<WeightFormat::kF32AndF16>(a.states);
    case WeightFormat::kSplitBF16: return kernel_on<WeightFormat::kSplitBF16>(a.states);
  }
  return nullptr;
}

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// As load_run and store_run demand: 16 bytes, 8 of a run of bytes.
bool aligned(const StepArguments& a) {
  const std::uintptr_t states = a.states == StateDType::k8Bit ? 8 : 16;
  return aligned(a.gradient, 16) && aligned(a.master, 16) && aligned(a.low, 16) && aligned(a.parameter, 16) &&
         aligned(a.state0.data, states) && aligned(a.state1.data, states);
}

}  // namespace

cudaError_t decide_step(const StepRequest& request, const double* sum_of_squares, const std::uint8_t* used,
                        std::int64_t* steps, AdamConstants* constants, int parameters, DeviceDecision* decision,
                        cudaStream_t stream) {
  return launch(decide, 1, kThreads, stream, request, sum_of_squares, used, steps, constants, parameters, decision);
}

cudaError_t adam_step(const DeviceRun& run, const DeviceDecision* decision, const std::int64_t* steps,
                      const AdamConstants* constants, cudaStream_t stream) {
  const StepArguments& a = run.arguments;
  if (a.numel == 0) return cudaSuccess;
  if (!aligned(a)) return cudaErrorMisalignedAddress;
  int count = 0;
  if (const cudaError_t error = multiprocessors(count); error != cudaSuccess) return error;
  const std::size_t needed = (a.numel + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>(needed, std::size_t(count) * kBlocksPerProcessor));
  return launch(kernel_of(a), blocks, kThreads, stream, a, run.stream, decision, steps + run.first_step,
                constants + run.first_step);
}

}  // namespace tessera::cuda
