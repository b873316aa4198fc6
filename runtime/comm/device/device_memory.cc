#include "runtime/comm/device/device_memory.h"

#include <ATen/ops/zeros.h>

#include <string>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<CommBuffer>> DeviceBuffer::allocate(std::size_t bytes, c10::Device device) try {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  at::Tensor memory = at::zeros({static_cast<std::int64_t>(bytes)}, options);
  return std::unique_ptr<CommBuffer>(new DeviceBuffer(std::move(memory)));
} catch (const std::exception& error) {
  return make_error(ExitCode::kOsResource,
                    "cannot allocate " + std::to_string(bytes) + " bytes on " + device.str() + ": " +
                        text_of_c10_exception(error) +
                        ". [T0455] hint: shard over more GPUs, or give \"offload\" a tier below memory");
}

at::ScalarType sum_type_of(DType dtype) {
  return dtype == DType::kF32 ? at::kFloat : dtype == DType::kBF16 ? at::kBFloat16 : at::kHalf;
}

}  // namespace tessera
