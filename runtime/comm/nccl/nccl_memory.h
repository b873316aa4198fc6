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

/// Memory of one communicator that NCCL knows, so that collectives go from and to it without a copy in between
/// (`comm.nccl_buffers`). It is made by ncclMemAlloc, in a pool of LibTorch's allocator; ProcessGroupNCCL registers what
/// the pool gets. NCCL wants a call's buffers at the same place of it on every rank, or registered on none.
class NcclMemory {
 public:
  /// `kind` registered is plain where the GPU has no multicast memory (NVSwitch).
  static absl::StatusOr<std::shared_ptr<NcclMemory>> create(c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend,
                                                            c10::Device device, NcclBuffers kind);

  /// As Collectives::allocate. The piece keeps the pool.
  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes);
  /// NCCL no longer knows any of it. Before the communicator ends.
  void release();

 private:
  NcclMemory(c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend, c10::Device device)
      : backend_(std::move(backend)), device_(device) {}

  c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend_;
  const c10::Device device_;
  std::shared_ptr<at::cuda::MemPool> pool_;  ///< null: plain memory
};

}  // namespace tessera
