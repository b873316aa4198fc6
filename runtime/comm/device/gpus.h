#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

namespace tessera {

/// GPUs of this machine, at least one. Errors: 69 where this build has no CUDA (gpus_missing.cc) or this machine no
/// usable GPU.
absl::StatusOr<int> gpu_count();

/// This thread's GPU from now on. Errors: 69 as gpu_count, 78 where this machine has no GPU of that index.
absl::Status use_gpu(int index);

}  // namespace tessera
