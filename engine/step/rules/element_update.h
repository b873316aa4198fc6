#pragma once

// See docs/glossary.md: flat group.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/own_optimizer.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// The numbers that an element's update needs in addition to its own values.
struct UpdateRates {
  float gradient_scale = 1.0F;
  float clip_value = 0.0F;       ///< StepScalars::clip_value
  double lr = 0.0;               ///< the common rate after the schedule
  bool is_first_of_run = false;  ///< StepScalars::is_first_of_run
};

/// A run of elements that have taken part in the same number of steps, and are updated with the same numbers. If
/// `is_updated` is false, the step does not change them, but it still updates their average.
struct UpdateRun {
  Extent extent;
  std::int64_t step = 0;                        ///< number of this step, counted from 1
  std::size_t group = FlatParameter::kNoGroup;  ///< FlatParameter::group
  bool is_updated = true;
};

/// The CPU's update of elements, one by one. It finds the elements of a flat group that are updated with the same
/// numbers in a step, and updates them. Masters and states may belong to training on the CPU, or to training on a GPU
/// that keeps them in its host's memory.
class ElementUpdate {
 public:
  /// `rates` must outlive this object.
  ElementUpdate(const Strategy& strategy, const OwnRules& own_rules, const LearningRates& rates);

  /// Appends the runs of `part` of the group to `runs`. Neighbouring parameters that are updated with the same numbers
  /// (UpdateRun) form one run, which includes the padding behind them. `used` says which parameters take part in this
  /// step. It begins with the group's parameters and may have entries of other parameters behind them. `steps` has the
  /// number of steps in which each of the group's parameters has taken part; the function adds this step.
  void find_runs(const FlatGroup& group, Extent part, std::span<const char> used, std::int64_t* steps,
                 std::vector<UpdateRun>& runs) const;

  /// Uses the numbers in `options` from now on. REQUIRES: no call is under way.
  void follow(const UpdateOptions& options);

  StepScalars scalars_of(const UpdateRates& rates, const UpdateRun& run) const;
  const Optimizer& optimizer_of(const UpdateRun& run) const { return *optimizers_[run.group + 1]; }
  /// Updates `slice`. `optimizer`: the optimizer of the run, or an optimizer for groups of matrices.
  void update(const Optimizer& optimizer, const OptimizerSlice& slice, const UpdateRates& rates,
              const UpdateRun& run) const;

 private:
  const LearningRates& rates_;
  const bool averages_;                                 ///< strategy.ema
  std::vector<std::unique_ptr<Optimizer>> optimizers_;  ///< [0]: for parameters in no group; [1 + i]: for those of
                                                        ///< group i
};

}  // namespace tessera
