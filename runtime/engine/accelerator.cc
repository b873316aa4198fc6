#include "runtime/engine/accelerator.h"

namespace tessera {
namespace {

std::function<Accelerator()>& accelerator_of_host() {
  static std::function<Accelerator()> make;
  return make;
}

}  // namespace

Accelerator accelerator_of(const Collectives& group) {
  if (group.gpu() != Collectives::kHostMemory) return cuda_accelerator(group.gpu());
  return accelerator_of_host() ? accelerator_of_host()() : Accelerator{};
}

void set_accelerator_of_host(std::function<Accelerator()> make) { accelerator_of_host() = std::move(make); }

}  // namespace tessera
