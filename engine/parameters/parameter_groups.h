#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Whether `pattern` (`*` and `?` as in file names) fits one of the parameter's names.
bool is_named(const FlatParameter& parameter, const std::string& pattern);

/// Writes FlatParameter::group. Throws tessera::Error: 78 where a pattern fits no parameter, with the nearest name, or a
/// parameter would be in two groups. Looks at frozen parameters too, so that freezing changes no group.
void assign_groups(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer);

/// Which parameters are updated as matrices, or in whole: `is_matrix` of `partition`.
std::function<bool(const FlatParameter&)> matrices_of(const OptimizerConfig& optimizer);

/// For people: a row a group with its parameters and numbers, what is in no group last. Empty where there are neither groups nor
/// matrices that are updated as such.
std::string table_of_groups(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer);

}  // namespace tessera
