#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace tessera {

/// Memory of training state as host code sees it: itself where that is the host's, else a copy. For set-up and for
/// what is rare: fetching waits for the device.
class HostView {
 public:
  enum Content { kFetch, kUndefined };

  HostView(void* memory, std::int64_t bytes, c10::Device device, Content content);

  std::byte* data() const { return data_; }
  /// What host code wrote is there from now on.
  void write_back() const;

 private:
  void* const memory_;
  const c10::Device device_;
  at::Tensor copy_;  ///< of device memory
  std::byte* data_;
};

}  // namespace tessera
