#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The learning rates of a run before its schedule: everybody's, of which each group (OptimizerConfig::groups) has a
/// share, unless it was given one of its own.
class LearningRates {
 public:
  explicit LearningRates(const OptimizerConfig& optimizer);

  /// A group's own rate; or everybody's, of which all groups have their shares again.
  void set(double lr, std::optional<std::size_t> group);
  double everybodys() const { return rates_[0]; }

  /// The rate of a group, or of what is in none (FlatParameter::kNoGroup). `scheduled`: what the schedule makes of
  /// everybody's; a group's own has none.
  double of(double scheduled, std::size_t group) const;

  /// Everybody's, then each group's own, or NaN.
  std::span<const double> all() const { return rates_; }
  /// REQUIRES: `all` of rates for the same groups.
  void restore(std::span<const double> all) { rates_.assign(all.begin(), all.end()); }

 private:
  std::vector<double> ratios_;  ///< [group]: its share of everybody's rate
  std::vector<double> rates_;
};

}  // namespace tessera
