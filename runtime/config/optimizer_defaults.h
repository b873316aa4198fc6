#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The values of a rule that a strategy may leave out, and that differ between rules or between versions of Tessera.
struct OptimizerDefaults {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  MuonLrAdjustment adjust_lr = MuonLrAdjustment::kOriginal;
};

/// Returns the defaults of a type. `version`: OptimizerConfig::defaults_version; a version later than this program's
/// version counts as this program's.
OptimizerDefaults defaults_of(OptimizerType type, std::int64_t version = OptimizerConfig::kDefaultsVersion);

/// A key that a strategy leaves out and that had another default before.
struct ChangedDefault {
  std::string key;          ///< "optimizer.weight_decay"
  std::string now, before;  ///< default values as JSON, of this version and of version 1
};

/// Returns the changed keys that the optimizer's rule reads, in the order of docs/strategy.md.
std::vector<ChangedDefault> changed_defaults(const OptimizerConfig& optimizer);

}  // namespace tessera
