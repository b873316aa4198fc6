#pragma once

#include <string>

#include "optim/optimizer.h"
#include "optim/step_loops.h"

namespace tessera {

/// Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it (Sutskever et al., ICML 2013, but with
/// the learning rate outside the buffer):
///
///   g += weight_decay * p
///   buffer = g at the first step (t = 1), afterwards momentum * buffer + (1 - dampening) * g
///   p -= lr * (nesterov ? g + momentum * buffer : buffer)
///
/// Without momentum there is no buffer: p -= lr * g. Stateless and safe to use from many threads at once, on disjoint
/// slices.
class Sgd final : public Optimizer {
 public:
  /// Throws `std::invalid_argument` for 8-bit states; a strategy file that asks for them is refused before.
  explicit Sgd(const OptimizerConfig& config, InstructionSet set = best_instruction_set());

  int num_states() const override { return config_.momentum != 0.0 ? 1 : 0; }
  std::string state_name(int index) const override { return "momentum_buffer"; }
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  /// What does not change from step to step.
  SgdConstants constants() const;

 private:
  OptimizerConfig config_;
  const StepLoops* loops_;
};

}  // namespace tessera
