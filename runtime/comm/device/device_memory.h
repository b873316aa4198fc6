#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/torch/tensor_on.h"

namespace tessera {

/// A CommBuffer in a device's memory, from LibTorch's allocator. It is filled with zeros.
class DeviceBuffer : public CommBuffer {
 public:
  /// Error: 71, with LibTorch's message, if the device does not have that much memory.
  static absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes, c10::Device device);

  std::byte* data() const override { return static_cast<std::byte*>(memory_.data_ptr()); }
  std::size_t bytes() const override { return memory_.nbytes(); }

 private:
  explicit DeviceBuffer(at::Tensor memory) : memory_(std::move(memory)) {}
  const at::Tensor memory_;
};

/// Returns LibTorch's type for a DType that can be summed.
at::ScalarType sum_type_of(DType dtype);

}  // namespace tessera
