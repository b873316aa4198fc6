#include <c10/cuda/CUDAFunctions.h>
#include <dlfcn.h>

#include <string>

#include "runtime/base/status.h"
#include "runtime/comm/device/gpus.h"

namespace tessera {
namespace {

/// Returns whether LibTorch's library for GPUs is in the process, and loads it if it is not. Its functions are then
/// found at every call of them.
bool has_gpu_library() {
  constexpr char kName[] = "libtorch_cuda.so";
  return ::dlopen(kName, RTLD_LAZY | RTLD_NOLOAD) != nullptr || ::dlopen(kName, RTLD_LAZY | RTLD_GLOBAL) != nullptr;
}

}  // namespace

void load_gpu_libraries() {
  // The driver's library is there where a GPU can be used, and is small.
  if (::dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) has_gpu_library();
}

absl::StatusOr<int> gpu_count() {
  if (const int count = c10::cuda::device_count(); count > 0) {
    if (has_gpu_library()) return count;
    const char* const reason = ::dlerror();
    return make_error(ExitCode::kUnavailable, std::string("LibTorch's library for GPUs cannot be loaded: ") +
                                                  (reason != nullptr ? reason : "no reason is known") +
                                                  ". hint: install PyTorch for CUDA in the version that Tessera was "
                                                  "built with");
  }
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
