#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace tessera {

/// The state of LibTorch's default generator of a device: kByte [bytes], in host memory.
at::Tensor state_of_generator(c10::Device device);

/// `state`: what state_of_generator gave. Throws c10::Error if it is of another kind of generator.
void set_generator(c10::Device device, const at::Tensor& state);

}  // namespace tessera
