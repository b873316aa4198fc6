#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "optim/adafactor.h"
#include "optim/device_kernels.h"
#include "sharding/unit.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"

namespace tessera {

/// A whole tensor, in the memory of its owner, on which the rule computes. Elements lie as in the parameter's memory
/// (FlatParameter::strides).
struct WholeTensor {
  const FlatParameter& parameter;
  std::span<float> masters;                                           ///< updated in place
  std::span<float> gradient;                                          ///< scaled and clipped; may be overwritten
  std::span<const TensorState> state_shapes;                          ///< result of TensorRule::states_of
  std::array<std::span<float>, MatrixOptimizer::kMostStates> states;  ///< [state]: of the shapes in state_shapes
  double lr = 0, weight_decay = 0;
  std::int64_t step = 1;  ///< number of this tensor's steps, this step included
};

/// An update rule that uses the whole tensor at once. One thread at a time may use it. Its work on a GPU is queued.
class TensorRule {
 public:
  virtual ~TensorRule() = default;
  /// Returns the states that are kept for a tensor: at most MatrixOptimizer::kMostStates. Throws tessera::Error (64) if
  /// the program made a mistake.
  virtual std::vector<TensorState> states_of(const FlatParameter& parameter) const = 0;
  virtual void update(const WholeTensor& tensor) const = 0;
};

/// Makes the rule of adafactor or own_matrix; returns null for other types. `kernels`: the kernels of `device` if it is
/// a GPU, which must outlive the rule; null on the CPU.
std::shared_ptr<const TensorRule> make_tensor_rule(const OptimizerConfig& optimizer, const OwnRules& own_rules,
                                                   c10::Device device = c10::kCPU, DeviceKernels* kernels = nullptr);

/// Writes GroupShape::tensor_states and TensorStateMemory::shapes of all groups of matrices, for `parts` equal parts.
/// `rule` may be null.
void add_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, const TensorRule* rule, int parts);

/// Gives a MatrixOptimizer the interface of TensorRule, which owners of matrices use.
class OwnMatrixRule final : public TensorRule {
 public:
  /// REQUIRES: `rule` is not null.
  OwnMatrixRule(std::shared_ptr<const MatrixOptimizer> rule, c10::Device device)
      : rule_(std::move(rule)), device_(device) {}

  /// Throws tessera::Error (64) if there are too many states, or if states have bad names or sizes.
  std::vector<TensorState> states_of(const FlatParameter& parameter) const override;
  /// Throws the exceptions of the rule, and tessera::Error (64) if the rule replaced an argument by another tensor.
  void update(const WholeTensor& tensor) const override;

 private:
  const std::shared_ptr<const MatrixOptimizer> rule_;
  const c10::Device device_;
};

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
