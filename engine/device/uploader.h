#pragma once

#include <memory>
#include <vector>

#include "optim/device_kernels.h"
#include "sharding/compute_device.h"
#include "tessera/upload.h"

namespace tessera {

/// Makes Uploads. A copy reads pinned memory: that of the tensor if it is pinned, else a staging buffer. A staging buffer
/// is used again once its copy is over, so a steady loop allocates nothing on the host.
class Uploader {
 public:
  /// `kernels`: null on the CPU.
  Uploader(ComputeDevice device, DeviceKernels* kernels) : device_(device), kernels_(kernels) {}

  Upload start(const std::vector<at::Tensor>& host);

 private:
  /// What a copy reads, until it is over.
  struct Source {
    std::shared_ptr<std::byte> staging;
    std::size_t bytes = 0;
    std::vector<at::Tensor> tensors;  ///< pinned ones
    std::shared_ptr<DeviceKernels::Mark> copied;
  };
  Source& idle_source(std::size_t bytes);

  const ComputeDevice device_;
  DeviceKernels* const kernels_;
  std::vector<Source> sources_;
};

}  // namespace tessera
