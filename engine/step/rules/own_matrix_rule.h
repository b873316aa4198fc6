#pragma once

#include "engine/step/rules/tensor_rule.h"

namespace tessera {

/// Gives a MatrixOptimizer the interface of TensorRule, which owners of matrices use.
class OwnMatrixRule final : public TensorRule {
 public:
  /// REQUIRES: `rule` is not null.
  OwnMatrixRule(std::shared_ptr<const MatrixOptimizer> rule, c10::Device device)
      : rule_(std::move(rule)), device_(device) {}

  /// Throws tessera::Error (64) where the states are too many, or have bad names or sizes.
  std::vector<TensorState> states_of(const FlatParameter& parameter) const override;
  /// Throws what the rule throws, and tessera::Error (64) if it replaced an argument by another tensor.
  void update(const WholeTensor& tensor) const override;

 private:
  const std::shared_ptr<const MatrixOptimizer> rule_;
  const c10::Device device_;
};

}  // namespace tessera
