#include "runtime/torch/tensor_on.h"

#include <ATen/ops/from_blob.h>

namespace tessera {

at::Tensor tensor_on(c10::Device device, const void* data, std::size_t numel, at::ScalarType type) {
  // If no device were given, LibTorch would ask CUDA each time on which device the memory lies.
  const auto options = at::TensorOptions().dtype(type).device(device);
  return at::for_blob(const_cast<void*>(data), {static_cast<std::int64_t>(numel)})
      .options(options)
      .target_device(device)
      .make_tensor();
}

}  // namespace tessera
