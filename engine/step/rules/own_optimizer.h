#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "optim/rule_optimizer.h"
#include "tessera/own_rules.h"

namespace tessera {

/// Makes the optimizer of parameters that are updated element by element. If the program defines a rule for elements,
/// the result is an OwnOptimizer; otherwise make_optimizer of optim makes it. Under adafactor there are no such
/// parameters; the optimizer then only applies masters that are computed elsewhere. Throws tessera::Error (64) if
/// optimizer.type (own or own_matrix) asks for a rule that the program does not define, or if the program defines a
/// rule for which the type does not ask.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config, const EmaConfig& ema,
                                          const OwnRules& own_rules);

/// Gives an ElementwiseOptimizer the interface of all optimizers. OwnDeviceUpdate calls it on a GPU. The program's rule
/// gets a run in portions that fill whole vectors of LibTorch's operators. An element's bits therefore do not depend on
/// where the run begins. One thread at a time may use it.
class OwnOptimizer final : public Optimizer {
 public:
  /// `config`: the configuration of a group. Throws tessera::Error (64) if the rule has too many states, or states with
  /// bad names.
  OwnOptimizer(std::shared_ptr<const ElementwiseOptimizer> rule, const OptimizerConfig& config, const EmaConfig& ema);

  const std::vector<StateInfo>& states() const override { return states_; }
  /// Throws the exceptions of the rule, and tessera::Error (64) if the rule replaced an argument by another tensor.
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  void average(const OptimizerSlice& slice) const override;
  void swap_average(const OptimizerSlice& slice) const override;
  void set_numbers(const OptimizerConfig& config) override { weight_decay_ = config.weight_decay; }

  /// Returns the optimizer that writes masters, parameters and averages: SGD without momentum, which has no states.
  const RuleOptimizer& bare() const { return bare_; }
  /// Returns the slice as `bare()` takes it.
  OptimizerSlice without_states(const OptimizerSlice& slice) const;
  /// Returns the number of elements that the rule gets for `count` elements: `count`, rounded up to whole vectors.
  static std::size_t filled_up(std::size_t count);
  /// Calls the rule for `count` elements of the slice from `begin` on. `parameters` [filled_up(count)]: the masters of
  /// these elements, on the slice's device. The function updates the states of the elements, and returns their new
  /// masters. Throws the errors of `step`.
  at::Tensor updated(const StepScalars& scalars, const OptimizerSlice& slice, std::size_t begin, std::size_t count,
                     const at::Tensor& parameters) const;

 private:
  /// `a`: the arguments for the elements from `begin` on.
  void update(const StepScalars& scalars, const OptimizerSlice& slice, std::size_t begin, StepArguments a) const;

  const std::shared_ptr<const ElementwiseOptimizer> rule_;
  double weight_decay_;
  const RuleOptimizer bare_;  ///< SGD without momentum, which has masters, parameters and averages, and no states
  const StepLoops& loops_;
  std::vector<StateInfo> states_;
  std::size_t own_states_ = 0;
};

}  // namespace tessera
