#pragma once

#include "engine/step/tensor_rule.h"

namespace tessera {

/// Adafactor (optim/adafactor.h) of whole tensors of any shape. States have the shapes and names that PyTorch gives them. Of parameters that do
/// not lie in rows (channels_last) the owner makes two copies in rows while it updates them, which are not in the plan.
class AdafactorRule final : public TensorRule {
 public:
  explicit AdafactorRule(const AdafactorConfig& config) : config_(config) {}

  std::vector<TensorState> states_of(const FlatParameter& parameter) const override;
  void update(const WholeTensor& tensor) const override;

 private:
  const AdafactorConfig config_;
};

}  // namespace tessera
