#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace tessera {

/// Tensors that are being copied to the device that an Engine trains on (Engine::upload), while that device computes. On
/// the CPU nothing is copied. The Engine must outlive it.
class Upload {
 public:
  Upload(Upload&&) noexcept;
  Upload& operator=(Upload&&) noexcept;
  ~Upload();

  /// In the order given. What is queued from now on comes after the copy; the host does not wait.
  const std::vector<at::Tensor>& tensors();

 private:
  friend class Uploader;
  struct State;
  explicit Upload(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tessera
