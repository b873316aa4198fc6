#pragma once

#include "engine/step/rules/tensor_rule.h"
#include "optim/adafactor.h"

namespace tessera {

/// Adafactor (optim/adafactor.h) of whole tensors of any shape. States have the shapes and names that PyTorch gives
/// them. The owner of a parameter that is not stored row by row (channels_last) makes two row-by-row copies during the
/// update; the plan does not count them. The plan does not count memory for sums on a GPU either: about a hundredth of
/// a tensor, and a double for each of many small matrices.
class AdafactorRule final : public TensorRule {
 public:
  /// `kernels`: those of the device, if it is a GPU.
  AdafactorRule(const AdafactorConfig& config, c10::Device device, DeviceKernels* kernels)
      : config_(config), device_(device), kernels_(kernels) {}

  std::vector<TensorState> states_of(const FlatParameter& parameter) const override;
  void update(const WholeTensor& tensor) const override;

 private:
  void step(const AdafactorStep& numbers, const AdafactorTensor& tensor) const;

  const AdafactorConfig config_;
  const c10::Device device_;
  DeviceKernels* const kernels_;
};

}  // namespace tessera
