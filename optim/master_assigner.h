#pragma once

#include <vector>

#include "optim/rule_optimizer.h"

namespace tessera {

/// SGD without momentum, which keeps no state: for passes over masters, parameters and averages that a rule elsewhere
/// computed.
OptimizerConfig sgd_without_states(const OptimizerConfig& config);

/// Takes in masters that a rule of whole tensors computed elsewhere, in one pass, with the promises of Optimizer.
class MasterAssigner final : public Optimizer {
 public:
  explicit MasterAssigner(const OptimizerConfig& config, const EmaConfig& ema = {},
                          InstructionSet set = best_instruction_set());

  /// Returns the average, where weights are averaged; else none.
  const std::vector<StateInfo>& states() const override { return elements_.states(); }
  /// Returns the slice in the form that loops and kernels take.
  StepArguments arguments(const OptimizerSlice& slice) const { return elements_.arguments(slice); }
  const RuleOptimizer& elements() const { return elements_; }
  /// Writes the masters of `count` elements of the slice, from its `begin`th on, to `masters` [count].
  void read(const OptimizerSlice& slice, std::size_t begin, std::size_t count, float* masters) const;
  /// Takes `slice.gradient` as the new masters. Only `step` counts among the scalars.
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  void average(const OptimizerSlice& slice) const override { elements_.average(slice); }
  void swap_average(const OptimizerSlice& slice) const override { elements_.swap_average(slice); }
  void set_numbers(const OptimizerConfig&) override {}  // the program's rule, which runs elsewhere, has these numbers

 private:
  const RuleOptimizer elements_;  ///< SGD without momentum: masters, parameters and averages, and no states
  const StepLoops& loops_;
};

}  // namespace tessera
