#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "optim/device_kernels.h"
#include "sharding/unit.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"

namespace tessera {

/// A whole tensor, in the memory of its owner, where the rule computes. Elements lie as in the parameter's memory
/// (FlatParameter::strides).
struct WholeTensor {
  const FlatParameter& parameter;
  std::span<float> masters;                                           ///< updated in place
  std::span<float> gradient;                                          ///< scaled and clipped; may be overwritten
  std::span<const TensorState> state_shapes;                          ///< result of TensorRule::states_of
  std::array<std::span<float>, MatrixOptimizer::kMostStates> states;  ///< [state]: of the shapes in state_shapes
  double lr = 0, weight_decay = 0;
  std::int64_t step = 1;  ///< number of steps of this tensor, with this one
};

/// An update rule that looks at all of a tensor at a time. One thread at a time may use it. What it does on a GPU is
/// queued.
class TensorRule {
 public:
  virtual ~TensorRule() = default;
  /// Returns the states that are kept for a tensor: at most MatrixOptimizer::kMostStates. Throws tessera::Error (64)
  /// for a program's mistake.
  virtual std::vector<TensorState> states_of(const FlatParameter& parameter) const = 0;
  virtual void update(const WholeTensor& tensor) const = 0;
};

/// Makes the rule of adafactor or own_matrix; returns null for other types. `kernels`: those of the GPU that is the
/// `device`, which outlive the rule; null on the CPU.
std::shared_ptr<const TensorRule> make_tensor_rule(const OptimizerConfig& optimizer, const OwnRules& own_rules,
                                                   c10::Device device = c10::kCPU, DeviceKernels* kernels = nullptr);

/// Writes GroupShape::tensor_states and TensorStateMemory::shapes of all groups of matrices, for `parts` equal parts.
/// `rule` may be null.
void add_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, const TensorRule* rule, int parts);

}  // namespace tessera
