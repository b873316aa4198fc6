#include <c10/cuda/CUDAFunctions.h>

#include <string>

#include "runtime/base/status.h"
#include "runtime/comm/device/gpus.h"

namespace tessera {

absl::StatusOr<int> gpu_count() {
  if (const int count = c10::cuda::device_count(); count > 0) return count;
  return make_error(ExitCode::kUnavailable,
                    "comm.transport wants a GPU, but this machine has no usable CUDA device. [T0456] hint: `tessera "
                    "doctor` says what there is; without a GPU take comm.transport \"host\" or \"gloo\"");
}

absl::Status use_gpu(int index) {
  TESSERA_ASSIGN_OR_RETURN(const int count, gpu_count());
  if (index < count) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
    return absl::OkStatus();
  }
  return make_error(ExitCode::kConfig, "local rank " + std::to_string(index) +
                                           " wants a GPU of its own, but there are " + std::to_string(count) +
                                           ". [T0457] hint: start as many ranks a host as it has GPUs");
}

}  // namespace tessera
