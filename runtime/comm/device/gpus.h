#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

namespace tessera {

/// Loads LibTorch's library for GPUs into the process, where this machine has NVIDIA's driver. tessera-train is linked
/// without that library (tessera_load_cuda_late in cmake/TesseraCuda.cmake), and calls this before anything of LibTorch:
/// LibTorch looks once whether it has GPUs. In other programs the library is there from the start.
void load_gpu_libraries();

/// Returns the number of GPUs of this machine, at least one. Error: 69 if this build has no CUDA (gpus_missing.cc), if
/// this machine has no usable GPU, or if LibTorch's library for GPUs cannot be loaded.
absl::StatusOr<int> gpu_count();

/// Makes `index` the calling thread's GPU from now on. Errors: 69 as gpu_count, 78 if this machine has no GPU of that
/// index.
absl::Status use_gpu(int index);

}  // namespace tessera
