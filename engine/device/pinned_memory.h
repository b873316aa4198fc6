#pragma once

#include <string>

#include "offload/files/aligned_memory.h"
#include "optim/device_kernels.h"

namespace tessera {

/// Returns a function that allocates memory of the host that a GPU can copy from and to (pinned memory). The function
/// throws tessera::Error (71) if the host does not have enough pinned memory; the message names `rank` and `what`, and
/// ends with `hint`. `kernels` must outlive the function.
AlignedMemory::Give pinned_memory_of(DeviceKernels& kernels, int rank, const std::string& what,
                                     const std::string& hint);

}  // namespace tessera
