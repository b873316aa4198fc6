#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The learning rates of a run before its schedule multiplies them: the rate of all parameters, and the rates of the
/// groups (OptimizerConfig::groups). A group has a share of the common rate unless it was given a rate of its own.
/// Steps and update rules read the rates; Step::set_lr changes them between steps.
class LearningRates {
 public:
  explicit LearningRates(const OptimizerConfig& optimizer);

  /// Sets the rate of one group. If `group` is empty, it sets the common rate, and the rate of each group is again its
  /// share of the common rate.
  void set(double lr, std::optional<std::size_t> group);
  double everybodys() const { return rates_[0]; }

  /// Returns the rate of a group, or of parameters in no group (FlatParameter::kNoGroup). `scheduled`: the common rate
  /// after the schedule; the schedule does not apply to a group's own rate.
  double of(double scheduled, std::size_t group) const;

  /// Returns the common rate, and then each group's own rate (NaN: the group has none).
  std::span<const double> all() const { return rates_; }
  /// REQUIRES: `all` comes from `all()` of rates for the same groups.
  void restore(std::span<const double> all) { rates_.assign(all.begin(), all.end()); }

 private:
  std::vector<double> ratios_;  ///< [group]: its share of the common rate
  std::vector<double> rates_;
};

}  // namespace tessera
