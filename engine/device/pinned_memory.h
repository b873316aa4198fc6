#pragma once

#include <string>

#include "offload/files/aligned_memory.h"
#include "optim/device_kernels.h"

namespace tessera {

/// Memory of the host that a GPU copies from and to, for `what`. What is returned throws tessera::Error (71) where the host has not so much
/// of it, with the hint what needs less. `kernels` outlive it.
AlignedMemory::Give pinned_memory_of(DeviceKernels& kernels, int rank, const std::string& what,
                                     const std::string& hint);

}  // namespace tessera
