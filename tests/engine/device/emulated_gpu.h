#pragma once

#include <functional>
#include <memory>
#include <string>

#include "optim/device_kernels.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/mesh.h"

namespace tessera::testing {

class LateBackend;

// An emulated GPU, to test an Engine on machines without a GPU. Kernels are those of optim/cuda, compiled for the host;
// LibTorch's operators run on the CPU. Everything that a GPU does late happens here as late as possible. Before a
// thread waits, collectives move no data and no data come back to the host. A missing wait, or memory that is used
// again too early, therefore gives wrong values each time.

/// The time at which a copy reads its bytes. The bytes of a copy to the host appear only when the host waits, in both
/// cases.
enum class CopiesRead {
  /// A copy reads its source when a thread waits for it. This reveals memory that is used again too early.
  kLate,
  /// A copy reads its source when it is queued. This reveals copies that were queued before their bytes were there, or
  /// that were not queued again after the bytes had changed.
  kAtOnce
};

/// Makes the kernels. They are in a separate file, because CUDA's keywords have other meanings there.
std::unique_ptr<DeviceKernels> emulated_kernels(CopiesRead read = CopiesRead::kLate);

/// Returns whether memory is the host's pinned memory, the only host memory that the emulated device copies from and
/// to. All other memory counts as memory of a device.
bool is_pinned_memory(const void* memory);

/// Lets Engines of this process train on emulated GPUs while this object exists. It is an error if host code mistakes
/// device memory for host memory, or host memory for device memory.
class EmulatedGpus {
 public:
  explicit EmulatedGpus(CopiesRead read = CopiesRead::kLate);
  ~EmulatedGpus();
};

/// Gives ranks collectives that are as late as possible.
ThreadRanks late(ThreadRanks ranks);

/// Gives each rank its own GPU. The ranks are joined as by NCCL: by a c10d::Backend that is late. `made` sees each
/// rank's backends, with the name of their group.
using SeesBackend = std::function<void(const std::string& group, LateBackend& backend)>;
ThreadRanks over_backend(ThreadRanks ranks, SeesBackend made = nullptr);

/// Lets ranks share an emulated GPU through the cuda_host transport.
ThreadRanks on_one_gpu(ThreadRanks ranks);

}  // namespace tessera::testing
