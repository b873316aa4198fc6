#pragma once

#include <string>
#include <vector>

#include "optim/loops/step_loops.h"
#include "optim/optimizer.h"

namespace tessera {

/// Returns the rule that updates elements for an optimizer type: the rule of the same name or, for muon and own_matrix,
/// the rule of adamw. Throws `std::invalid_argument` for kOwn and kAdafactor, which do not update elements one by one.
StepRule rule_of(OptimizerType type);

/// Returns the numbers that rules read from `config`.
RuleNumbers rule_numbers(const OptimizerConfig& config);

/// An optimizer whose rule is a formula for one element (optim/rules). It works in one pass on the CPU. The object
/// itself has no state. Many threads may use it at once, on disjoint slices, except for set_numbers.
class RuleOptimizer final : public Optimizer {
 public:
  /// Throws `std::invalid_argument` for states that the rule cannot keep in the configured dtype. (A strategy file that
  /// asks for such states is refused earlier.)
  explicit RuleOptimizer(const OptimizerConfig& config, const EmaConfig& ema = {},
                         InstructionSet set = best_instruction_set());

  const std::vector<StateInfo>& states() const override { return states_; }
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  void average(const OptimizerSlice& slice) const override;
  void swap_average(const OptimizerSlice& slice) const override { loops_->swap_average(arguments(slice)); }
  void set_numbers(const OptimizerConfig& config) override { numbers_ = rule_numbers(config); }

  StepRule rule() const { return rule_; }
  const RuleNumbers& numbers() const { return numbers_; }
  /// Returns the slice in the form that loops and kernels take, without the scalars of a step. Throws
  /// `std::invalid_argument` if a part of the slice has a wrong length, if the master's kind cannot be written to the
  /// parameter's dtype, or if a run with 8-bit states does not begin at a block. The message names the optimizer, the
  /// part and both values. A mismatch is a bug of the caller. The check costs almost nothing, while writing past a
  /// shard would silently corrupt its neighbour.
  StepArguments arguments(const OptimizerSlice& slice) const;

 private:
  const std::string name_;
  StepRule rule_;
  RuleNumbers numbers_;
  StateDType state_dtype_;
  float average_share_;  ///< 1 - decay of the average; 0 if there is no average
  std::vector<StateInfo> states_;
  std::vector<int> places_;  ///< [state in `states_`, except the average]: index of the state among the rule's states
  const StepLoops* loops_;
};

}  // namespace tessera
