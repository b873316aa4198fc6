#pragma once

// See docs/glossary.md: placement, unit.

#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// The axes of the mesh over which each kind of state is cut.
struct PlacementAxes {
  CutAxes parameters, gradients, optimizer;
  friend bool operator==(const PlacementAxes&, const PlacementAxes&) = default;
};

/// A placement that has a name. HYBRID_SHARD has two rows, one for each value of "shard_over".
struct PlacementRow {
  ShardingStrategy strategy;
  bool over_world = false;  ///< OptimizerConfig::shard_over_world
  PlacementAxes axes = {};
  bool keeps_gathered = false;  ///< sharded parameters stay gathered from forward to the end of backward
};

/// All names of placements. This table alone defines the meaning of a name: `placement_of`
/// (sharding/layout/placement.h) and the rules of the strategy file read it.
const std::vector<PlacementRow>& placement_rows();

/// Returns the row of a name. `over_world` counts only for HYBRID_SHARD.
const PlacementRow& placement_row(ShardingStrategy strategy, bool over_world);

/// Returns the axes that a strategy gives: the axes in its "placement", or else those of the row with its name. A kind
/// of state that a "placement" leaves out counts as cut over no axis.
PlacementAxes placement_axes(const Strategy& strategy);

/// Returns the names of the axes, as the strategy file has them: "host", "rank".
std::vector<std::string> names_of_axes(const CutAxes& axes);

/// Returns whether parameters stay gathered from forward to the end of backward. It is false for every "placement".
bool keeps_gathered(const Strategy& strategy);

/// Returns whether parameters are cut, and gathered unit by unit into memory that is freed after use.
bool releases_parameters(const Strategy& strategy);

/// Returns whether several ranks may hold the same part of some state. A mesh whose "host" axis is left open may have
/// several hosts.
bool holds_copies(const Strategy& strategy);

/// Returns whether the strategy has the axes of `name`, given as "strategy" or as "placement".
bool is_placed_as(const Strategy& strategy, ShardingStrategy name);

/// Returns a text that says what is wrong with a "placement", with the remedy. It is empty if the placement is legal.
/// REQUIRES: the "placement" gives all kinds of state.
std::string problem_of(const PlacementAxes& axes);

/// Returns the strategy's name for messages, or "placement by axes".
std::string name_of_placement(const Strategy& strategy);

/// Returns a line such as "parameters [], gradients [], optimizer [rank] (as SHARD_OPTIMIZER)". The names in
/// parentheses are those of the rows with the axes of a "placement", if there are such rows.
std::string describe_placement(const Strategy& strategy);

}  // namespace tessera
