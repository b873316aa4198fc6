#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "runtime/comm/collectives.h"
#include "tessera/strategy.h"

namespace at::cuda {
struct MemPool;
}

namespace tessera {

/// A communicator's memory that is registered with NCCL, so that collectives read and write it without a copy
/// (`comm.nccl_buffers`). ncclMemAlloc makes this memory, in a pool of LibTorch's allocator; ProcessGroupNCCL registers
/// the pool's memory. NCCL needs the buffers of a call at the same offset in this memory on every rank. If the offsets
/// differ, no rank may register the memory.
class NcclMemory {
 public:
  /// Makes the pool. The memory is plain on a GPU without multicast memory (NVSwitch), even if `kind` asks for
  /// registered memory.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> create(c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend,
                                                            c10::Device device, NcclBuffers kind);

  /// Implements Collectives::allocate. The buffer keeps the pool alive.
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes);
  /// Removes all of the memory from NCCL's registration. Call it before the communicator ends.
  void release();

 private:
  NcclMemory(c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend, c10::Device device)
      : backend_(std::move(backend)), device_(device) {}

  c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend_;
  const c10::Device device_;
  std::shared_ptr<at::cuda::MemPool> pool_;  ///< null: plain memory
};

}  // namespace tessera
