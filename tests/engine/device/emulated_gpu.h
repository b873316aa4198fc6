#pragma once

#include <functional>
#include <memory>
#include <string>

#include "optim/device_kernels.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/mesh.h"

namespace tessera::testing {

class LateBackend;

// An emulated GPU, to test an Engine where there is no GPU. Kernels are those of optim/cuda, compiled for the host;
// LibTorch's operators run on the CPU. What a GPU does late happens here as late as it may: collectives move nothing,
// and nothing comes back to the host, before a thread waits for it. So a missing wait, or memory that is used again too
// early, gives wrong values each time.

/// Says when a copy reads its bytes. Bytes of a copy to the host appear only when the host waits, in both cases.
enum class CopiesRead {
  /// A copy reads its source when a thread waits for it. This shows memory that is used again too early.
  kLate,
  /// A copy reads its source when it is queued. This shows copies that were queued before their bytes were there, or
  /// that were not queued anew when the bytes changed.
  kAtOnce
};

/// Makes the kernels. They are in a file of their own, because CUDA's keywords have other meanings there.
std::unique_ptr<DeviceKernels> emulated_kernels(CopiesRead read = CopiesRead::kLate);

/// Returns whether memory is the host's pinned memory, the only host memory that the emulated device copies from and
/// to. All other memory stands for memory of a device.
bool is_pinned_memory(const void* memory);

/// Lets Engines of this process train on emulated GPUs while this object lives. Host code that takes device memory for
/// host memory, or the reverse, is an error.
class EmulatedGpus {
 public:
  explicit EmulatedGpus(CopiesRead read = CopiesRead::kLate);
  ~EmulatedGpus();
};

/// Gives ranks collectives that are as late as they may be.
ThreadRanks late(ThreadRanks ranks);

/// Gives each rank a GPU of its own, joined as NCCL would: by a c10d::Backend that is late. `made` sees each rank's
/// backends, with the name of their group.
using SeesBackend = std::function<void(const std::string& group, LateBackend& backend)>;
ThreadRanks over_backend(ThreadRanks ranks, SeesBackend made = nullptr);

/// Lets ranks share an emulated GPU by the cuda_host transport.
ThreadRanks on_one_gpu(ThreadRanks ranks);

}  // namespace tessera::testing
