#pragma once

#include <memory>
#include <vector>

#include "optim/device_kernels.h"
#include "sharding/compute_device.h"
#include "tessera/upload.h"

namespace tessera {

/// Makes Uploads: copies of a batch to the GPU that run at the same time as the computation. The Engine owns it; one
/// thread at a time calls it. A copy reads pinned memory: the tensor's own memory if that is pinned, else a staging
/// buffer. A staging buffer is used again once its copy has ended, so a loop whose batches have the same sizes
/// allocates nothing more on the host.
class Uploader {
 public:
  /// `kernels` is null on the CPU; else it must outlive this object.
  Uploader(ComputeDevice device, DeviceKernels* kernels) : device_(device), kernels_(kernels) {}

  /// Begins to copy the tensors of `host` to the device; on the CPU it returns them as they are. Throws tessera::Error
  /// (64) for a tensor that is not on the CPU.
  Upload start(const std::vector<at::Tensor>& host);

 private:
  /// The memory that a copy reads until it has ended.
  struct Source {
    std::shared_ptr<std::byte> staging;
    std::size_t bytes = 0;
    std::vector<at::Tensor> tensors;  ///< pinned tensors, which the copy reads in place
    std::shared_ptr<DeviceKernels::Mark> copied;
  };
  Source& idle_source(std::size_t bytes);

  const ComputeDevice device_;
  DeviceKernels* const kernels_;
  std::vector<Source> sources_;
};

}  // namespace tessera
