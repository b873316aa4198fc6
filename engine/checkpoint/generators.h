#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace tessera {

/// Returns the state of LibTorch's default random generator of a device: kByte [bytes], in host memory. Checkpoints and
/// commits hold it. The generator's mutex is held during the call.
at::Tensor state_of_generator(c10::Device device);

/// Sets the generator of `device` to `state`, which state_of_generator returned. Throws c10::Error where `state`
/// belongs to another kind of generator.
void set_generator(c10::Device device, const at::Tensor& state);

}  // namespace tessera
