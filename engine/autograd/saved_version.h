#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>

namespace tessera {

/// The version at which a tensor was saved for backward. LibTorch does not compare the versions of tensors that hooks
/// save, so the hook that gives a tensor back compares them. The counter is shared with the tensor and its views, and
/// outlives them.
class SavedVersion {
 public:
  SavedVersion() = default;
  explicit SavedVersion(const at::Tensor& tensor)
      : counter_(torch::autograd::impl::version_counter(tensor)), saved_(counter_.current_version()) {}

  /// Throws LibTorch's own error (c10::Error) if the tensor was written in place after it was saved.
  void expect_unchanged() const {
    TORCH_CHECK(
        counter_.current_version() == saved_,
        "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
        "version ",
        counter_.current_version(), "; expected version ", saved_,
        " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient.");
  }
  const c10::VariableVersion& counter() const { return counter_; }

 private:
  c10::VariableVersion counter_;
  std::uint32_t saved_ = 0;
};

}  // namespace tessera
