#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "engine/device/accelerator.h"
#include "optim/cuda/cuda_kernels.h"

namespace tessera {

Accelerator cuda_accelerator(int gpu) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  const auto index = static_cast<c10::DeviceIndex>(gpu);
  Accelerator accelerator = queued_accelerator(c10::Device(c10::kCUDA, index), cuda_kernels([index] {
                                                 c10::cuda::set_device(index);  // any thread may call this
                                                 return c10::cuda::getCurrentCUDAStream(index).stream();
                                               }));
  accelerator.allocated = [index] {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const c10::CachingAllocator::Stat bytes = allocator::getDeviceStats(index).allocated_bytes[kAll];
    return AllocatedBytes{bytes.current, bytes.peak};
  };
  if (cudaDeviceProp properties; cudaGetDeviceProperties(&properties, gpu) == cudaSuccess)
    accelerator.name = properties.name;
  accelerator.forget_peak = [index] { allocator::resetPeakStats(index); };
  return accelerator;
}

}  // namespace tessera
