#pragma once

#include <functional>
#include <memory>
#include <string>

#include "optim/device_kernels.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/mesh.h"

namespace tessera::testing {

class LateBackend;

// A GPU to test an Engine with where there is none. Kernels are those of optim/cuda, their source run on the host; what
// LibTorch does, it does on the CPU. What a GPU does late happens as late as it may: collectives move nothing, and
// nothing comes back to the host, before somebody waits for it. So a missing wait, or memory that is used again too
// early, gives wrong values here each time.

/// When a copy reads its bytes. Those of a copy to the host are nowhere before the host waits, either way.
enum class CopiesRead {
  kLate,   ///< when somebody comes after it: shows memory that is used again too early
  kAtOnce  ///< when it is queued: shows copies that were queued before their bytes were there, or that were not queued anew when those changed
};

/// The kernels. In a file of its own, since CUDA's words mean other things there.
std::unique_ptr<DeviceKernels> emulated_kernels(CopiesRead read = CopiesRead::kLate);

/// Whether memory is the host's, which the emulated device copies from and to and nothing else: what pinned_memory gave. All other
/// memory stands for a device's.
bool is_pinned_memory(const void* memory);

/// While it lives, Engines of this process train on emulated GPUs. Host code that takes memory of the one for the other's is an error.
class EmulatedGpus {
 public:
  explicit EmulatedGpus(CopiesRead read = CopiesRead::kLate);
  ~EmulatedGpus();
};

/// Ranks whose collectives are as late as they may be.
ThreadRanks late(ThreadRanks ranks);

/// Ranks that have a GPU each, joined as by NCCL: through a c10d::Backend that is late. `made` sees each rank's backends
/// by the name of their group.
using SeesBackend = std::function<void(const std::string& group, LateBackend& backend)>;
ThreadRanks over_backend(ThreadRanks ranks, SeesBackend made = nullptr);

/// Ranks that share an emulated GPU through the cuda_host transport.
ThreadRanks on_one_gpu(ThreadRanks ranks);

}  // namespace tessera::testing
