#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "engine/step/agree/update_options.h"
#include "optim/layerwise_optimizer.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The norms that LAMB and LARS compare for one parameter: the 2-norms of its weights and of its update.
struct LayerNormPair {
  double weights = 0, update = 0;
};

/// The optimizers of LAMB and LARS, with the numbers of each group of parameters. LayerwiseUpdate uses a LayerwiseRule
/// with norms that all ranks add up from their parts, and ShardUpdate uses one with norms of whole groups.
class LayerwiseRule {
 public:
  /// REQUIRES: the strategy's rule is lamb or lars.
  explicit LayerwiseRule(const Strategy& strategy);

  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options);

  /// `config` is FlatParameter::group.
  const LayerwiseOptimizer& optimizer_of(std::size_t config) const { return *optimizers_[config + 1]; }

  /// Makes the second pass over a slice of `group`. `scalars.lr` is the rate before norms change it. `norms_of(i)`
  /// returns the norms of the group's parameter `i`; it is called for the slice's parameters whose rate is adapted to
  /// the norms.
  void step(const FlatGroup& group, const OptimizerSlice& slice, const StepScalars& scalars, std::size_t config,
            c10::function_ref<LayerNormPair(std::size_t)> norms_of) const;

 private:
  /// [0]: for parameters in no group; [1 + i]: for the parameters of group i
  std::vector<std::unique_ptr<LayerwiseOptimizer>> optimizers_;
  std::vector<bool> adapts_;  ///< with the same index: whether the rates are adapted to norms
};

}  // namespace tessera
