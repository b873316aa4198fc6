#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/agree/update_options.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/rules/tensor_rule.h"
#include "optim/master_assigner.h"
#include "optim/muon_optimizer.h"
#include "sharding/compute_device.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// A matrix, or a tensor if the rule updates whole tensors. All its elements lie in the memory of the rank that
/// computes its update.
struct WholeMatrix {
  std::span<float> gradient;  ///< [numel]: the gradient or direction; under muon the result is written here
  /// [numel]: masters, into which the result is written; empty unless the rule updates whole tensors
  std::span<float> masters;
  std::span<float> states;  ///< [TensorStates::extent_of]: all states of the tensor, updated in place
  std::span<float> work;    ///< scratch; muon needs 2 * numel + 2 * (shorter side)^2 elements (orthogonalize)
};

/// Muon or a TensorRule, with the numbers of each group of parameters. It makes the update of one whole matrix, and the
/// passes over single elements before and after this update. MatrixUpdate uses a MatrixRule for matrices that ranks
/// exchange, and ShardUpdate uses one for whole groups.
class MatrixRule {
 public:
  /// `rule` is null under muon. `device` is the device in whose memory whole matrices lie.
  MatrixRule(const Strategy& strategy, std::shared_ptr<const TensorRule> rule, ComputeDevice device = {});

  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options);

  /// Returns whether there is a pass before the work on whole matrices. In this pass, Muon updates momenta, and writes
  /// directions over the gradients.
  bool makes_directions() const { return !rule_; }
  /// Makes this pass over a slice. `config` is FlatParameter::group.
  void make_directions(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars,
                       std::size_t config) const;

  /// The numbers with which a rule of whole tensors updates a tensor.
  struct Numbers {
    const UpdateRates& rates;  ///< gradient_scale and clip_value
    double lr;                 ///< rate of the parameter
    std::int64_t step;         ///< steps in which the parameter took part, this one included
  };
  /// Updates tensor `i` of the group. Exceptions of a program's rule are passed on. `numbers` may be null under muon.
  void compute(const FlatGroup& group, std::size_t i, const WholeMatrix& whole, const Numbers* numbers) const;

  /// Returns the Muon optimizer of a group. REQUIRES: makes_directions().
  const MuonOptimizer& muon_of(std::size_t config) const { return *directions_[config + 1]; }
  /// Returns the optimizer that reads masters, and stores changed masters in the form in which they are kept; null
  /// under muon.
  const MasterAssigner* assigner() const { return rule_ ? assigners_[0].get() : nullptr; }
  /// Returns the optimizer that applies the results.
  const Optimizer& optimizer_of(std::size_t config) const;
  /// Returns the arguments for the GPU's kernel that applies the results.
  StepArguments step_arguments(const OptimizerSlice& slice) const;

 private:
  void orthogonalize_matrix(const FlatGroup& group, std::size_t i, const WholeMatrix& whole) const;
  void scale(std::span<float> gradient, const UpdateRates& rates) const;
  void apply_rule(const FlatGroup& group, std::size_t i, const WholeMatrix& whole, const Numbers& numbers) const;

  const MuonConfig muon_;
  const ComputeDevice device_;
  const std::shared_ptr<const TensorRule> rule_;
  // The first element of each vector is for parameters in no group, and each other element is for one group. One of the
  // first two vectors is empty.
  std::vector<std::unique_ptr<MuonOptimizer>> directions_;
  std::vector<std::unique_ptr<MasterAssigner>> assigners_;
  std::vector<double> weight_decays_;
};

}  // namespace tessera
