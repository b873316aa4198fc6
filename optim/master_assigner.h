#pragma once

#include <vector>

#include "optim/rule_optimizer.h"

namespace tessera {

/// Returns SGD without momentum, which keeps no state. It is used for passes over masters, parameters and averages if
/// other code computes the rule.
OptimizerConfig sgd_without_states(const OptimizerConfig& config);

/// Applies masters that a rule on whole tensors has computed, in one pass. It gives the guarantees of Optimizer.
class MasterAssigner final : public Optimizer {
 public:
  explicit MasterAssigner(const OptimizerConfig& config, const EmaConfig& ema = {},
                          InstructionSet set = best_instruction_set());

  /// Returns the average if weights are averaged; otherwise there is no state.
  const std::vector<StateInfo>& states() const override { return elements_.states(); }
  /// Returns the slice in the form that loops and kernels take.
  StepArguments arguments(const OptimizerSlice& slice) const { return elements_.arguments(slice); }
  const RuleOptimizer& elements() const { return elements_; }
  /// Writes the masters of `count` elements of the slice, from element `begin` on, to `masters` [count].
  void read(const OptimizerSlice& slice, std::size_t begin, std::size_t count, float* masters) const;
  /// Uses the values in `slice.gradient` as the new masters. It uses no scalars except `step` and `is_first_of_run`.
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  void average(const OptimizerSlice& slice) const override { elements_.average(slice); }
  void swap_average(const OptimizerSlice& slice) const override { elements_.swap_average(slice); }
  void set_numbers(const OptimizerConfig&) override {}  // does nothing: the rule with these numbers runs elsewhere

 private:
  const RuleOptimizer elements_;  ///< SGD without momentum, which updates masters, parameters and averages and has no
                                  ///< states
  const StepLoops& loops_;
};

}  // namespace tessera
