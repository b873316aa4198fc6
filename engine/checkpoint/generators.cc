#include "engine/checkpoint/generators.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

#include "engine/checkpoint/tensor_bytes.h"

namespace tessera {

at::Tensor state_of_generator(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return host_copy(generator.get_state());
}

void set_generator(c10::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace tessera
