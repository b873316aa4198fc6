#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "tessera/dtype.h"

namespace tessera::cuda {

/// The inputs that device_sum adds up. They are passed to the kernel by value.
struct SumInputs {
  static constexpr int kMost = 8;
  const void* inputs[kMost] = {};
  int count = 0;
};

/// Does the same as pairwise_sum (pairwise_sum.h) on the GPU, with the same bits: `output[i]` is the sum in fp32 of the
/// inputs' i-th elements of `dtype` (fp32, bf16 or fp16), neighbours first. It reads each input once and writes the
/// output once. All pointers are device memory. Returns the error that CUDA gives for the launch.
cudaError_t device_sum(const SumInputs& inputs, DType dtype, float* output, std::size_t numel, cudaStream_t stream);

}  // namespace tessera::cuda
