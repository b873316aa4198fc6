#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace tessera {

/// Tensors on their way to the device that an Engine trains on (Engine::upload), beside what is computed there. On the
/// CPU they are there already. The Engine outlives it.
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
