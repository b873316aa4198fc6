#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

namespace tessera {

/// Returns the number of GPUs of this machine, at least one. Error: 69 if this build has no CUDA (gpus_missing.cc), or
/// if this machine has no usable GPU.
absl::StatusOr<int> gpu_count();

/// Makes `index` the calling thread's GPU from now on. Errors: 69 as for gpu_count; 78 if this machine has no GPU with
/// that index.
absl::Status use_gpu(int index);

}  // namespace tessera
