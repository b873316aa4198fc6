#pragma once

#include <ATen/ops/from_blob.h>

#include "sharding/scalar_type.h"

namespace tessera {

/// Memory of `device` as a tensor that does not own it.
inline at::Tensor memory_view(void* memory, DType dtype, at::IntArrayRef sizes, at::OptionalIntArrayRef strides,
                              c10::Device device) {
  const auto options = at::TensorOptions(scalar_type_of(dtype)).device(device);
  // Without a target LibTorch asks CUDA whose memory it is, each time.
  return at::for_blob(memory, sizes).strides(strides).options(options).target_device(device).make_tensor();
}

inline at::Tensor flat_view(void* memory, DType dtype, std::int64_t numel, c10::Device device) {
  return memory_view(memory, dtype, {numel}, std::nullopt, device);
}

}  // namespace tessera
