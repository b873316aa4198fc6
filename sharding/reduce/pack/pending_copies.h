#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

/// Copies of gradients to their places in buckets. On a GPU the copies wait, and are started together: starting one
/// copy costs the host about as much as starting a hundred. The caller must `flush` before anything reads a place.
class PendingCopies {
 public:
  /// Adds a copy of `gradient` to `place`, a view of a bucket, of any dtype. `place` must not be the place of a copy
  /// that already waits.
  void add(const at::Tensor& place, const at::Tensor& gradient);
  /// Starts all copies that wait.
  void flush();
  /// Starts all copies if there are many, or if the gradients that wait take much memory.
  void flush_if_many();
  /// Drops all copies without starting them.
  void drop();
  bool empty() const { return count_ == 0; }

 private:
  /// Copies of tensors with one dtype. LibTorch copies a list with few launches only if all of its tensors have the
  /// same dtype.
  struct Alike {
    at::ScalarType dtype;
    std::vector<at::Tensor> places, gradients;
  };

  std::vector<Alike> lists_;
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace tessera
