#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace tessera {

/// Returns a tensor of `numel` numbers at `data` that does not own them. `device` is the device on which they lie.
at::Tensor tensor_on(c10::Device device, const void* data, std::size_t numel, at::ScalarType type = at::kByte);

}  // namespace tessera
