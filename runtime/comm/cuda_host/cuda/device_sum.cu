// This file is compiled without fused multiply-add (a * b + c with one rounding), like the CPU's sums.

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "runtime/base/cuda_launch.h"
#include "runtime/comm/cuda_host/cuda/device_sum.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 2048;

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  __half value;
};

__device__ __forceinline__ float wide(float value) { return value; }
__device__ __forceinline__ float wide(Bf16 value) { return __builtin_bit_cast(float, std::uint32_t{value.bits} << 16); }
__device__ __forceinline__ float wide(F16 value) { return __half2float(value.value); }

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Several {
  T values[kWidth];
};

/// Adds neighbours; an odd last addend is carried up unchanged.
template <int kCount>
__device__ __forceinline__ float tree_sum(float (&values)[kCount]) {
#pragma unroll
  for (int left = kCount; left > 1; left = (left + 1) / 2) {
#pragma unroll
    for (int i = 0; i < left / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (left % 2 != 0) values[left / 2] = values[left - 1];
  }
  return values[0];
}

/// Adds up `kWidth` neighbouring elements at a time in each thread.
template <class T, int kCount, int kWidth>
__global__ void __launch_bounds__(kThreads) sum(SumInputs inputs, float* output, std::size_t runs) {
  const std::size_t threads = std::size_t{gridDim.x} * kThreads;
  for (std::size_t run = std::size_t{blockIdx.x} * kThreads + threadIdx.x; run < runs; run += threads) {
    Several<T, kWidth> loaded[kCount];
#pragma unroll
    for (int q = 0; q < kCount; ++q) loaded[q] = static_cast<const Several<T, kWidth>*>(inputs.inputs[q])[run];
    Several<float, kWidth> sums;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float values[kCount];
#pragma unroll
      for (int q = 0; q < kCount; ++q) values[q] = wide(loaded[q].values[k]);
      sums.values[k] = tree_sum<kCount>(values);
    }
    reinterpret_cast<Several<float, kWidth>*>(output)[run] = sums;
  }
}

template <class T, int kCount, int kWidth>
cudaError_t run(const SumInputs& inputs, float* output, std::size_t runs, cudaStream_t stream) {
  if (runs == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>((runs + kThreads - 1) / kThreads, kMostBlocks));
  return launch(sum<T, kCount, kWidth>, blocks, kThreads, stream, inputs, output, runs);
}

constexpr int kWide = 4;

template <class T>
bool aligned(const SumInputs& inputs, const float* output) {
  const auto at = [](const void* pointer, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
  };
  bool all = at(output, kWide * sizeof(float));
  for (int q = 0; q < inputs.count; ++q) all = all && at(inputs.inputs[q], kWide * sizeof(T));
  return all;
}

/// Sums runs of four elements if all pointers are aligned, and the remaining elements one by one.
template <class T, int kCount>
cudaError_t sum_of(const SumInputs& inputs, float* output, std::size_t numel, cudaStream_t stream) {
  const std::size_t runs = aligned<T>(inputs, output) ? numel / kWide : 0;
  if (const cudaError_t error = run<T, kCount, kWide>(inputs, output, runs, stream); error != cudaSuccess) return error;
  SumInputs rest = inputs;
  for (int q = 0; q < kCount; ++q) rest.inputs[q] = static_cast<const T*>(inputs.inputs[q]) + runs * kWide;
  return run<T, kCount, 1>(rest, output + runs * kWide, numel - runs * kWide, stream);
}

template <class T>
cudaError_t sum_of(const SumInputs& inputs, float* output, std::size_t numel, cudaStream_t stream) {
  switch (inputs.count) {
    case 1:
      return sum_of<T, 1>(inputs, output, numel, stream);
    case 2:
      return sum_of<T, 2>(inputs, output, numel, stream);
    case 3:
      return sum_of<T, 3>(inputs, output, numel, stream);
    case 4:
      return sum_of<T, 4>(inputs, output, numel, stream);
    case 5:
      return sum_of<T, 5>(inputs, output, numel, stream);
    case 6:
      return sum_of<T, 6>(inputs, output, numel, stream);
    case 7:
      return sum_of<T, 7>(inputs, output, numel, stream);
    case 8:
      return sum_of<T, 8>(inputs, output, numel, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t device_sum(const SumInputs& inputs, DType dtype, float* output, std::size_t numel, cudaStream_t stream) {
  switch (dtype) {
    case DType::kF32:
      return sum_of<float>(inputs, output, numel, stream);
    case DType::kBF16:
      return sum_of<Bf16>(inputs, output, numel, stream);
    case DType::kF16:
      return sum_of<F16>(inputs, output, numel, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace tessera::cuda
