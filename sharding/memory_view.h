#pragma once

#include <ATen/ops/from_blob.h>

#include "sharding/scalar_type.h"

namespace tessera {

/// Returns a tensor over memory of `device` that the tensor does not own. The memory must outlive the tensor.
inline at::Tensor memory_view(void* memory, DType dtype, at::IntArrayRef sizes, at::OptionalIntArrayRef strides,
                              c10::Device device) {
  const auto options = at::TensorOptions(scalar_type_of(dtype)).device(device);
  // If target_device were not set, LibTorch would ask CUDA each time for the device of the memory.
  return at::for_blob(memory, sizes).strides(strides).options(options).target_device(device).make_tensor();
}

/// Returns a view of `numel` elements, as a tensor [numel].
inline at::Tensor flat_view(void* memory, DType dtype, std::int64_t numel, c10::Device device) {
  return memory_view(memory, dtype, {numel}, std::nullopt, device);
}

}  // namespace tessera
