#pragma once

#include <string>

#include "optim/adam_constants.h"
#include "optim/optimizer.h"
#include "optim/step_loops.h"

namespace tessera {

/// Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) and AdamW (Loshchilov and Hutter, arXiv 1711.05101,
/// algorithm 2), by `config.type`; they differ only in where weight decay enters:
///
///   adam:  g += weight_decay * p          before the moments see it
///   adamw: p *= 1 - lr * weight_decay     before the step, outside the moments
///   m  = m + (1 - beta1) * (g - m)
///   v  = beta2 * v + (1 - beta2) * g * g
///   p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
///
/// The last line is computed as `step_size * m / (sqrt(v) + eps')`, with both bias corrections folded into step_size
/// and eps' in fp64 beforehand. It is the same formula as PyTorch's, rounded in another order: results agree to a few
/// units in the last place, not in bits. Stateless and safe to use from many threads at once, on disjoint slices.
class AdamW final : public Optimizer {
 public:
  explicit AdamW(const OptimizerConfig& config, InstructionSet set = best_instruction_set());

  int num_states() const override { return 2; }
  std::string state_name(int index) const override;
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  AdamHyperparameters hyperparameters() const;

 private:
  OptimizerConfig config_;
  const StepLoops* loops_;
};

}  // namespace tessera
