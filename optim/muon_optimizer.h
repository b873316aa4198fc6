#pragma once

#include <span>
#include <vector>

#include "optim/rule_optimizer.h"
#include "optim/rules/muon.h"

namespace tessera {

/// Makes the part of Muon that updates single elements: the pass before whole matrices are made orthogonal
/// (`direction`), and the pass after that (`step`). Both give the guarantees of Optimizer. Many threads may use it at
/// once, on disjoint slices.
class MuonOptimizer final : public Optimizer {
 public:
  explicit MuonOptimizer(const OptimizerConfig& config, const EmaConfig& ema = {},
                         InstructionSet set = best_instruction_set());

  /// Returns the momentum, followed by the average if weights are averaged.
  const std::vector<StateInfo>& states() const override { return elements_.states(); }
  /// Updates the momentum, and writes to `direction` [n] the values of the matrices before these are made orthogonal
  /// (MuonMomentumRule). `direction` may be the memory of the slice's gradient. Masters and parameters do not change.
  void direction(const StepScalars& scalars, const OptimizerSlice& slice, std::span<float> direction) const;
  /// Updates masters by a step against `slice.gradient`, which is a part of an orthogonal matrix and is neither scaled
  /// nor clipped. Weight decay is decoupled.
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  // Returns the arguments for kernels of a GPU, without the numbers that are in the GPU's tables (gradient scale,
  // noise, constants of a step).
  StepArguments direction_arguments(const OptimizerSlice& slice, std::span<float> direction) const;
  StepArguments step_arguments(const OptimizerSlice& slice) const;
  MuonMomentumConstants momentum_constants() const;
  /// Returns the numbers of `step`, which are those of SGD.
  const RuleNumbers& step_numbers() const { return step_; }

  void average(const OptimizerSlice& slice) const override { elements_.average(slice); }
  void swap_average(const OptimizerSlice& slice) const override { elements_.swap_average(slice); }
  void set_numbers(const OptimizerConfig& config) override;

 private:
  const RuleOptimizer elements_;  ///< SGD with momentum; its states are those of Muon
  RuleNumbers momentum_, step_;
  const StepLoops& loops_;
};

}  // namespace tessera
