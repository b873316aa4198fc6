#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace tessera {

/// Tensors that are being copied to the device on which an Engine trains (Engine::upload), while that device computes.
/// Nothing is copied if the device is the CPU. The Engine must outlive this object. The thread that drives the Engine
/// uses this object.
class Upload {
 public:
  /// The object that is moved from must not be used afterwards.
  Upload(Upload&&) noexcept;
  Upload& operator=(Upload&&) noexcept;
  ~Upload();

  /// Returns the tensors on the device, in the order given to Engine::upload. Operators that are queued from now on run
  /// after the copy; the host does not wait.
  const std::vector<at::Tensor>& tensors();

 private:
  friend class Uploader;
  struct State;
  explicit Upload(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tessera
