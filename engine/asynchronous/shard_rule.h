#pragma once

#include <optional>

#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/rules/layerwise_rule.h"
#include "engine/step/rules/matrix_rule.h"
#include "engine/step/rules/tensor_rule.h"
#include "runtime/config/strategy_names.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"

namespace tessera {

/// The rule by which a push updates a shard, with the numbers of each group of parameters. A LoneStep has a ShardRule,
/// and a server has one in the thread of each worker.
class ShardRule {
 public:
  /// `rates` must outlive this object. Throws as make_optimizer does.
  ShardRule(const Strategy& strategy, const OwnRules& own_rules, const LearningRates& rates)
      : rates_(rates), elements_(strategy, own_rules, rates) {
    const OptimizerConfig& optimizer = strategy.optimizer;
    if (adapts_layers(optimizer.type)) layers_.emplace(strategy);
    if (updates_whole_tensors(optimizer.type)) matrices_.emplace(strategy, make_tensor_rule(optimizer, own_rules));
  }

  /// Uses the numbers in `options` from now on. REQUIRES: no push is under way.
  void follow(const UpdateOptions& options) {
    elements_.follow(options);
    if (layers_) layers_->follow(options);
    if (matrices_) matrices_->follow(options);
  }

  /// Returns the rule of single elements. If the strategy has a rule of matrices, the rule of single elements is for
  /// the groups without matrices.
  const ElementUpdate& elements() const { return elements_; }
  /// These return the rule that needs whole groups. `layers` is null unless the strategy's rule is lamb or lars.
  /// `matrices` is null unless the rule is one of matrices or whole tensors.
  const LayerwiseRule* layers() const { return layers_ ? &*layers_ : nullptr; }
  const MatrixRule* matrices() const { return matrices_ ? &*matrices_ : nullptr; }
  /// Returns the rate of a parameter.
  double lr_of(const UpdateRates& rates, const FlatParameter& parameter) const {
    return rates_.of(rates.lr, parameter.group);
  }

 private:
  const LearningRates& rates_;
  ElementUpdate elements_;
  std::optional<LayerwiseRule> layers_;
  std::optional<MatrixRule> matrices_;
};

}  // namespace tessera
