#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Returns whether `pattern` (`*` and `?` as in file names) fits one of the parameter's names.
bool is_named(const FlatParameter& parameter, const std::string& pattern);

/// Sets FlatParameter::group of every parameter that a group names. Frozen parameters get groups too, so that freezing
/// does not change groups. Throws tessera::Error (78) if a pattern fits no parameter (with the most similar name), or
/// if a parameter would be in two groups.
void assign_groups(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer);

/// Returns a function that says which parameters are updated as matrices or as whole tensors (`is_matrix` of
/// `partition`); null if the optimizer updates no parameters in this way.
std::function<bool(const FlatParameter&)> matrices_of(const OptimizerConfig& optimizer);

/// Returns a table for readers: one row for each group with its parameters and numbers, and a last row for parameters
/// in no group. It is empty if there are neither groups nor tensors that are updated as a whole.
std::string table_of_groups(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer);

}  // namespace tessera
