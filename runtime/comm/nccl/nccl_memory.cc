#include "runtime/comm/nccl/nccl_memory.h"

#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <thread>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/device/device_memory.h"

namespace tessera {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

/// Makes LibTorch allocate from `pool` on this thread while the object lives.
class InPool {
 public:
  explicit InPool(at::cuda::MemPool& pool) : pool_(pool) {
    allocator::beginAllocateToPool(pool_.device(), pool_.id(), [own = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == own;
    });
  }
  ~InPool() {
    allocator::endAllocateToPool(pool_.device(), pool_.id());
    // This releases the reference that the constructor took; the pool keeps its own reference.
    allocator::releasePool(pool_.device(), pool_.id());
  }

 private:
  at::cuda::MemPool& pool_;
};

/// A buffer from the pool. The memory is declared after the pool to which it returns, so the memory is destroyed first.
class PooledBuffer : public CommBuffer {
 public:
  PooledBuffer(std::shared_ptr<at::cuda::MemPool> pool, std::unique_ptr<CommBuffer> memory)
      : pool_(std::move(pool)), memory_(std::move(memory)) {}
  std::byte* data() const override { return memory_->data(); }
  std::size_t bytes() const override { return memory_->bytes(); }

 private:
  const std::shared_ptr<at::cuda::MemPool> pool_;
  const std::unique_ptr<CommBuffer> memory_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<NcclMemory>> NcclMemory::create(c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend,
                                                               c10::Device device, NcclBuffers kind) try {
  std::shared_ptr<NcclMemory> memory(new NcclMemory(std::move(backend), device));
  if (kind == NcclBuffers::kPlain || !memory->backend_->supportsTensorAlloc(device.index())) return memory;
  const c10::cuda::CUDAGuard guard(device);
  memory->pool_ = std::make_shared<at::cuda::MemPool>(
      std::static_pointer_cast<allocator::CUDAAllocator>(memory->backend_->getMemAllocator()));
  memory->backend_->registerMemPool(memory->pool_.get());
  return memory;
} catch (const std::exception& error) {
  return make_error(ExitCode::kUnavailable, "NCCL cannot register memory of " + device.str() + ": " +
                                                text_of_c10_exception(error) +
                                                ". [T0473] hint: set \"comm\": {\"nccl_buffers\": \"plain\"}");
}

absl::StatusOr<std::unique_ptr<CommBuffer>> NcclMemory::allocate(std::size_t bytes) {
  if (!pool_) return DeviceBuffer::allocate(bytes, device_);
  const c10::cuda::CUDAGuard guard(device_);
  const InPool in_pool(*pool_);
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<CommBuffer> memory, DeviceBuffer::allocate(bytes, device_));
  return std::unique_ptr<CommBuffer>(std::make_unique<PooledBuffer>(pool_, std::move(memory)));
}

void NcclMemory::release() {
  if (pool_) backend_->deregisterMemPool(pool_.get());
  pool_.reset();
}

}  // namespace tessera
