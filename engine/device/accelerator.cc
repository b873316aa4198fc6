#include "engine/device/accelerator.h"

#include <utility>

namespace tessera {
namespace {

std::function<Accelerator()>& accelerator_of_host() {
  static std::function<Accelerator()> make;
  return make;
}

}  // namespace

Accelerator queued_accelerator(c10::Device device, std::unique_ptr<DeviceKernels> kernels) {
  Accelerator accelerator;
  accelerator.kernels = std::move(kernels);
  accelerator.exposed = std::make_unique<ExposedCommunication>(*accelerator.kernels);
  accelerator.device = {device, /*is_queued=*/true, accelerator.exposed.get()};
  return accelerator;
}

Accelerator accelerator_of(const Collectives& group) {
  if (group.gpu() != Collectives::kHostMemory) return cuda_accelerator(group.gpu());
  return accelerator_of_host() ? accelerator_of_host()() : Accelerator{};
}

void set_accelerator_of_host(std::function<Accelerator()> make) { accelerator_of_host() = std::move(make); }

}  // namespace tessera
